"""Kernels in Triton, each beside its torch reference; `choice.py` says when they are used.  docs/kernels.md counts bytes.

softmax.py               rows of any width, online; the recurrence that attention is built on
rms_norm.py              forward, and backward in one reading
cross_entropy.py         the loss of a chunk of logits, and their gradient written over them
attention.py             FlashAttention-2, forward; attention_backward.py its gradients; seen.py the masks of both
rotary.py                turning queries and keys
choice.py, dispatch.py   by setting or by measurement; the one function that each layer calls on a GPU
guard.py                 Triton, where it is

Nothing here is imported before a tensor on a GPU asks for it: Triton alone takes a second.
"""
