"""
The CUDA device: captured graphs over the arena, kernels compiled at run time, device copies.

================ =================================================================================
module           holds
================ =================================================================================
``compiler``     NVRTC: sources of this package to machine code, kept on disk
``driver``       loading that code and launching it, also inside a capture
``available``    may this machine serve, and how much fits on it
``decode``       the launches that fold one token
``prefill``      the launches that fold a grid chunk
``plan``         :class:`CudaGraphPlan`: the graphs, the mailbox
``copies``       save and restore as one launch
================ =================================================================================

Nothing here is imported before a CUDA device is asked for.
"""
