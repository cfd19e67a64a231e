"""Reading logit goldens (make_logits.py) and the distance of another implementation to them."""
import numpy as np


class Golden:
    def __init__(self, path):
        data = np.load(path)
        self.ids, self.first = data["ids"], int(data["first"])
        self.n_positions = self.ids.shape[1] - 1 - self.first  # of each sequence
        self.top_ids = data["top_ids"].reshape(-1, data["top_ids"].shape[-1]).astype(np.int64)
        self.top_logprobs = data["top_logprobs"].reshape(self.top_ids.shape).astype(np.float64)
        self.logsumexp = data["logsumexp"].reshape(-1).astype(np.float64)

    def limit(self, sequences, positions=None):
        """Keeps the first positions of the first sequences."""
        positions = positions or self.n_positions
        keep = (np.arange(len(self.ids))[:, None] < sequences) & (np.arange(self.n_positions)[None] < positions)
        keep = keep.reshape(-1)
        self.top_ids, self.top_logprobs, self.logsumexp = self.top_ids[keep], self.top_logprobs[keep], self.logsumexp[keep]
        self.ids, self.n_positions = self.ids[:sequences], positions
        return keep


def distance(golden, logprobs, best):
    """KL(golden || other) by position, over the golden's 64 most probable ids and one bucket for the rest; and top-1 agreement.

    logprobs: [positions, 64] of the other at the golden's ids; best: [positions] its most probable ids.
    """
    p, q = np.exp(golden.top_logprobs), np.exp(logprobs)
    rest_p, rest_q = np.clip(1 - p.sum(1), 1e-12, 1), np.clip(1 - q.sum(1), 1e-12, 1)
    kl = (p * (golden.top_logprobs - logprobs)).sum(1) + rest_p * np.log(rest_p / rest_q)
    return kl, best == golden.top_ids[:, 0]
