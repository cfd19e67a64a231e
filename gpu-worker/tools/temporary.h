/* The file or folder that a run writes beside its output until that is whole. A signal that ends the run removes it.
 *
 *   watch | hold(path), made ... finish(to): it gets its name, or drop(): it is removed
 *
 * One at a time. Either it is renamed whole, or removed: a signal waits for a rename that has begun. */
#pragma once

/* From now on SIGINT, SIGTERM and SIGHUP, those that are not ignored, remove what is held and end the process as they would.
 * -1: no thread or semaphore for it; then they leave it behind. */
int temporary_watch(void);
/* path: about to be made, kept until finish or drop; remove_it takes it away. NULL: it could not be made, nothing is held. */
void temporary_hold(const char *path, void (*remove_it)(const char *path));
/* Renames what is held; where `to` exists by now it fails. -1: errno says why, it is still held. */
int temporary_finish(const char *to);
/* Removes what is held, if anything. */
void temporary_drop(void);
