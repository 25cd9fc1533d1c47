"""Several tasks in one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigdl.common.errors import UsageError
from bigdl.friesian.models.columns import cardinalities, check_numbers, check_tasks
from bigdl.friesian.models.inputs import TableModel, TabularInput
from bigdl.friesian.models.layers import mlp

if TYPE_CHECKING:
    from bigdl.friesian.ops.schema import FeatureSchema

__all__ = ["MMoE", "MultiTaskLoss"]


class MMoE(TableModel):
    """Probabilities of several tasks, each by its own mixture of the same experts.

    Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts", KDD 2018.

    Parameters
    ----------
    categories : mapping of str to int
        Columns of whole numbers, and how many there are.
    numbers : sequence of str
        Columns of scaled numbers.
    tasks : sequence of str
        Names of the probabilities.
    dim : int, default 16
        Length of an embedding.
    experts : int, default 4
    expert_hidden : sequence of int, default (64,)
        Widths of every expert.
    tower_hidden : sequence of int, default (32,)
        Widths of the network of every task.
    dropout : float, default 0.0
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        tasks: Sequence[str] = ("label",),
        dim: int = 16,
        experts: int = 4,
        expert_hidden: Sequence[int] = (64,),
        tower_hidden: Sequence[int] = (32,),
        dropout: float = 0.0,
    ):
        check_tasks(tasks)
        table = TabularInput(categories, numbers, dim)
        super().__init__(table.feature_cols)
        self.tasks = list(tasks)
        self.input = table
        self.experts = nn.ModuleList(
            mlp(table.width, expert_hidden, dropout) for _ in range(experts)
        )
        self.gates = nn.ModuleList(nn.Linear(table.width, experts) for _ in self.tasks)
        self.towers = nn.ModuleList(
            nn.Sequential(
                mlp(expert_hidden[-1], tower_hidden, dropout), nn.Linear(tower_hidden[-1], 1)
            )
            for _ in self.tasks
        )

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        categories: Iterable[str],
        numbers: Iterable[str] = (),
        tasks: Sequence[str] = ("label",),
        **options,
    ) -> MMoE:
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        categories : list of str
            Columns of whole numbers.
        numbers, tasks : list of str
        **options
            Of the class.
        """
        sizes = cardinalities(schema, categories)
        return cls(sizes, check_numbers(schema, numbers), tasks, **options)

    def mixtures(self, *columns: Tensor) -> Tensor:
        """The shares of the experts in every task, of shape ``(n, tasks, experts)``."""
        return self._mixtures(self.input(self._checked(columns)))

    def _mixtures(self, rows: Tensor) -> Tensor:
        return torch.stack([gate(rows) for gate in self.gates], 1).softmax(-1)

    def forward(self, *columns: Tensor) -> dict[str, Tensor]:
        """Of every task probabilities of shape ``(n,)``, for the columns `feature_cols`."""
        rows = self.input(self._checked(columns))
        opinions = torch.stack([expert(rows) for expert in self.experts], 1)
        mixed = self._mixtures(rows) @ opinions
        outputs = [tower(mixed[:, i]).squeeze(1) for i, tower in enumerate(self.towers)]
        return {task: torch.sigmoid(each) for task, each in zip(self.tasks, outputs, strict=True)}


class MultiTaskLoss(nn.Module):
    """The sum of the binary cross-entropies of all tasks.

    Parameters
    ----------
    weights : sequence of float, optional
        Of the tasks; default 1.
    """

    def __init__(self, weights: Sequence[float] | None = None):
        super().__init__()
        self.weights = None if weights is None else [float(weight) for weight in weights]

    def forward(self, outputs: Mapping[str, Tensor], *targets: Tensor) -> Tensor:
        """The mean over the rows.

        Parameters
        ----------
        outputs : dict of str to Tensor of shape (n,)
        *targets : Tensor of shape (n,)
            In the order of the tasks.
        """
        weights = self.weights or [1.0] * len(outputs)
        if not len(outputs) == len(targets) == len(weights):
            raise UsageError(
                f"The model has the tasks {list(outputs)}, but there are {len(targets)} label_cols "
                f"and {len(weights)} weights; give one for each"
            )
        losses = [
            weight * F.binary_cross_entropy(output, target.reshape(output.shape).to(output.dtype))
            for weight, output, target in zip(weights, outputs.values(), targets, strict=True)
        ]
        return torch.stack(losses).sum()
