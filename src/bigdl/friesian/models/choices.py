"""Models of what a user chooses: probabilities of clicks, ratings, and of several tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigdl.common.errors import UsageError
from bigdl.friesian.models.layers import (
    FieldEmbeddings,
    TableModel,
    TabularInput,
    mlp,
    stack_numbers,
)
from bigdl.friesian.ops.schema import FeatureSchema, cardinalities, check_numbers


class NCF(TableModel):
    """The probability that a user chooses an item, of their two numbers alone (NeuMF).

    A product of embeddings (generalised matrix factorisation) and a network on other embeddings
    are weighed together: He et al., "Neural Collaborative Filtering", WWW 2017.

    Parameters
    ----------
    user_size, item_size : int
        The largest numbers plus 1.
    factors : int, default 16
        Length of the embeddings of the product.
    hidden : sequence of int, default (64, 32, 16)
        Widths of the network; the embeddings of user and item make its first layer's input and are
        half as long as its width each.
    dropout : float, default 0.0
    user, item : str
        Names of the columns.
    """

    def __init__(
        self,
        user_size: int,
        item_size: int,
        factors: int = 16,
        hidden: Sequence[int] = (64, 32, 16),
        dropout: float = 0.0,
        user: str = "user",
        item: str = "item",
    ):
        super().__init__([user, item])
        sizes, half = (user_size, item_size), hidden[0] // 2
        self.product = FieldEmbeddings(sizes, factors)
        self.network = FieldEmbeddings(sizes, half)
        self.hidden = mlp(2 * half, hidden, dropout)
        self.head = nn.Linear(factors + hidden[-1], 1)

    @classmethod
    def from_schema(
        cls, schema: FeatureSchema, user: str = "user", item: str = "item", **options
    ) -> NCF:
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        user, item : str
            Columns of whole numbers.
        **options
            Of the class.
        """
        sizes = schema.cardinality(user), schema.cardinality(item)
        return cls(*sizes, user=user, item=item, **options)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Probabilities of shape ``(n,)`` for numbers of shape ``(n,)``."""
        pair = (user, item)
        product = self.product(pair).prod(1)
        hidden = self.hidden(self.network(pair).flatten(1))
        return torch.sigmoid(self.head(torch.cat([product, hidden], 1))).squeeze(1)


class WideAndDeep(TableModel):
    """The probability of a click, by a linear model of crosses and a network.

    The linear part remembers which crossed categories came with clicks, the network generalises
    over embeddings: Cheng et al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.

    Parameters
    ----------
    wide : mapping of str to int
        Columns of the linear part, such as those of ``cross_columns``, and how many values each
        has.
    categories : mapping of str to int
        Columns that are embedded for the network; they may be in `wide` too.
    numbers : sequence of str
        Columns of scaled numbers, for the network.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0
    """

    def __init__(
        self,
        wide: Mapping[str, int],
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
    ):
        if not wide:
            raise UsageError("wide has no columns; name those of the linear part")
        super().__init__(dict.fromkeys([*wide, *categories, *numbers]))
        self.linear = FieldEmbeddings(wide.values(), 1)
        nn.init.zeros_(self.linear.table.weight)
        self.input = TabularInput(categories, numbers, dim)
        self.hidden = mlp(self.input.width, hidden, dropout)
        self.head = nn.Linear(hidden[-1], 1)
        self._wide = [self.feature_cols.index(name) for name in wide]
        self._deep = [self.feature_cols.index(name) for name in self.input.feature_cols]

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        wide: Iterable[str],
        categories: Iterable[str],
        numbers: Iterable[str] = (),
        **options,
    ) -> WideAndDeep:
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        wide, categories : list of str
            Columns of whole numbers.
        numbers : list of str
        **options
            Of the class.
        """
        sizes = cardinalities(schema, wide), cardinalities(schema, categories)
        return cls(*sizes, check_numbers(schema, numbers), **options)

    def forward(self, *columns: Tensor) -> Tensor:
        """Probabilities of shape ``(n,)`` for the columns `feature_cols`."""
        columns = self._checked(columns)
        wide = self.linear([columns[i] for i in self._wide]).sum((1, 2))
        deep = self.head(self.hidden(self.input([columns[i] for i in self._deep]))).squeeze(1)
        return torch.sigmoid(wide + deep)


class DeepFM(TableModel):
    """The probability of a click, by products of all pairs of fields and a network on them.

    Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI
    2017.  A number is a field whose embedding is a vector times the number.

    Parameters
    ----------
    categories : mapping of str to int
        Columns of whole numbers, and how many there are.
    numbers : sequence of str
        Columns of scaled numbers.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
    ):
        if not categories:
            raise UsageError("categories has no columns; name those that are embedded")
        super().__init__([*categories, *numbers])
        self._categories = len(categories)
        self.linear = FieldEmbeddings(categories.values(), 1)
        nn.init.zeros_(self.linear.table.weight)
        self.fields = FieldEmbeddings(categories.values(), dim)
        if numbers:
            self.slopes = nn.Parameter(torch.zeros(len(numbers)))
            self.directions = nn.Parameter(torch.randn(len(numbers), dim) * 0.05)
        self.bias = nn.Parameter(torch.zeros(()))
        self.hidden = mlp(len(self.feature_cols) * dim, hidden, dropout)
        self.head = nn.Linear(hidden[-1], 1)

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        categories: Iterable[str],
        numbers: Iterable[str] = (),
        **options,
    ) -> DeepFM:
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
        categories : list of str
            Columns of whole numbers.
        numbers : list of str
        **options
            Of the class.
        """
        return cls(cardinalities(schema, categories), check_numbers(schema, numbers), **options)

    def forward(self, *columns: Tensor) -> Tensor:
        """Probabilities of shape ``(n,)`` for the columns `feature_cols`."""
        columns = self._checked(columns)
        categories, numbers = columns[: self._categories], columns[self._categories :]
        first = self.bias + self.linear(categories).sum((1, 2))
        fields = self.fields(categories)
        if numbers:
            values = stack_numbers(numbers, fields.dtype)
            first = first + values @ self.slopes
            fields = torch.cat([fields, values.unsqueeze(-1) * self.directions], 1)
        # the sum of the products of all pairs is half of (square of the sum − sum of the squares)
        pairs = (fields.sum(1).square() - fields.square().sum(1)).sum(1) / 2
        deep = self.head(self.hidden(fields.flatten(1))).squeeze(1)
        return torch.sigmoid(first + pairs + deep)


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
        if isinstance(tasks, str) or not tasks:
            raise UsageError(f"tasks should be a list of names, got {tasks!r}")
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
