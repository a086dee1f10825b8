"""Triton kernels, each with its torch reference. docs/kernels.md counts their bytes.

rms_norm.py              forward, and backward in one reading
cross_entropy.py         the loss of a chunk of logits, and their gradient written over them
attention.py             FlashAttention-2, forward; attention_backward.py: its gradients; mask_bounds.py: their masks
tiled_attention.py       FlashAttention-2 in torch: the same algorithm for any mask, on any device
rotary.py                rotation of queries and keys
autotune.py, dispatch.py selection by setting or measurement; the one function that each layer calls on a GPU
triton_support.py        the import of Triton

The Triton files are imported at the first use on a GPU, because importing Triton takes a second.
"""
