"""Least squares fit of positive parameters of a simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

__all__ = ["fitted"]

_STEP = 1e-3  # of a logarithm


def fitted(
    residuals: Callable[[np.ndarray], np.ndarray], start: Sequence[float], rounds: int = 40
) -> np.ndarray:
    """Fit positive parameters by Levenberg-Marquardt on their logarithms.

    Parameters
    ----------
    residuals : callable
        From an array of numbers to an array of residuals; without noise.
    start : sequence of float
        Above 0; the result is from a ten-thousandth to a hundred times as large.
    rounds : int
        At most.

    Returns
    -------
    ndarray of float64
    """
    logs = np.log(np.asarray(start, np.float64))
    # a number that does not matter must not run away
    low, high = logs - np.log(1e4), logs + np.log(1e2)
    here, damping = residuals(np.exp(logs)), 1e-2
    for _ in range(rounds):
        slopes = np.stack(
            [(residuals(np.exp(logs + _unit(i, logs))) - here) / _STEP for i in range(len(logs))],
            axis=1,
        )
        curvature, down = slopes.T @ slopes, slopes.T @ here
        for _ in range(8):
            weighted = curvature + damping * (
                np.diag(np.diag(curvature)) + 1e-9 * np.eye(len(logs))
            )
            move = np.clip(np.linalg.solve(weighted, -down), -2, 2)
            there = np.clip(logs + move, low, high)
            errors = residuals(np.exp(there))
            if errors @ errors < here @ here:
                break
            damping *= 4
        else:
            break
        gain = 1 - (errors @ errors) / (here @ here) if here @ here else 0.0
        logs, here, damping = there, errors, damping / 6
        if gain < 1e-6:
            break
    return np.exp(logs)


def _unit(number, logs):
    step = np.zeros_like(logs)
    step[number] = _STEP
    return step
