/* Whether a sanitizer is compiled in. Models run ten to thirty times slower under one; what it looks for is found on a smaller
 * matrix too. */
#pragma once

#if defined __SANITIZE_ADDRESS__ || defined __SANITIZE_THREAD__
enum { SANITIZED = 1 };
#else
enum { SANITIZED = 0 };
#endif
