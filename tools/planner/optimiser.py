"""Muon: momentum whose matrix updates are made orthogonal (Jordan et al., 2024)."""

from __future__ import annotations

import torch


def orthogonalise(g: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """
    Drive the singular values of a batch of matrices towards 1 by a quintic Newton-Schulz
    iteration.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.bfloat16() if g.is_cuda else g.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).to(x.dtype)
    for _ in range(steps):
        y = x @ x.transpose(-1, -2)
        x = a * x + (b * y + c * (y @ y)) @ x
    return (x.transpose(-1, -2) if tall else x).float()


class Muon(torch.optim.Optimizer):
    """One momentum tensor for each shape, so a step is a few dozen batched products."""

    def __init__(self, params, lr: float, momentum: float = 0.95, decay: float = 0.02):
        super().__init__(list(params), {'lr': lr, 'momentum': momentum, 'decay': decay})
        self.shapes: dict = {}
        for p in self.param_groups[0]['params']:
            self.shapes.setdefault(tuple(p.shape), []).append(p)

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        for shape, params in self.shapes.items():
            grad = torch.stack([p.grad for p in params])
            state = self.state.setdefault(params[0], {})
            if 'momentum' not in state:
                state['momentum'] = torch.zeros_like(grad)
            m = state['momentum'].lerp_(grad, 1 - group['momentum'])
            update = orthogonalise(grad.lerp(m, group['momentum']))
            rate = group['lr'] * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(params, 1 - group['lr'] * group['decay'])
            torch._foreach_add_(params, list(update.unbind()), alpha=-rate)
