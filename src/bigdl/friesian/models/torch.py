"""Recommender models for PyTorch, and their common layers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigdl.common.errors import UsageError
from bigdl.friesian.ops.schema import FeatureSchema, cardinalities, check_numbers

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class FieldEmbeddings(nn.Module):
    """Embeddings of several columns, stored in one table.

    One look-up returns the vectors of all columns. Ids outside of a column's range become 0, the id
    of unknown values.

    Parameters
    ----------
    sizes : iterable of int
        Cardinality of each column.
    dim : int
        Length of a vector.
    sharded : bool
        True makes the table a :class:`~bigdl.orca.torch.ShardedEmbedding`, whose weights have the
        same name and shape.
    """

    if TYPE_CHECKING:  # TorchScript evaluates class annotations
        sizes: Tensor
        offsets: Tensor

    def __init__(self, sizes: Iterable[int], dim: int, sharded: bool = False):
        super().__init__()
        sizes = [max(1, size) for size in sizes]
        small = partial(nn.init.normal_, std=0.05)
        table: Any
        if sharded:
            from bigdl.orca.torch import ShardedEmbedding

            table = ShardedEmbedding(sum(sizes), dim, init=small)
        else:
            table = nn.Embedding(sum(sizes), dim)
            small(table.weight)
        self.table = table
        self.register_buffer("sizes", torch.tensor(sizes, dtype=torch.int64), persistent=False)
        offsets = torch.tensor([0, *accumulate(sizes)][:-1], dtype=torch.int64)
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, columns: Sequence[Tensor]) -> Tensor:
        """Return vectors of shape ``(..., fields, dim)`` for id columns of shape ``(...)``."""
        numbers = torch.stack([column.to(torch.int64) for column in columns], -1)
        known = (numbers >= 0) & (numbers < self.sizes)
        return self.table(torch.where(known, numbers, 0) + self.offsets)


def mlp(width: int, hidden: Sequence[int], dropout: float = 0.0, activation=nn.ReLU):
    """Build a multi-layer perceptron with hidden layers of the widths `hidden`.

    Parameters
    ----------
    width : int
        Width of the input.
    hidden : sequence of int
    dropout : float
        Dropout probability during training.
    activation : callable
        Builds the activation module.

    Returns
    -------
    torch.nn.Sequential
    """
    layers: list[nn.Module] = []
    for into, out in pairwise([width, *hidden]):
        layers += [nn.Linear(into, out), activation()]
        if dropout:
            layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers)


def stack_numbers(columns: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Stack columns of shape ``(n,)`` into a matrix ``(n, columns)``."""
    return torch.stack([column.to(dtype) for column in columns], -1)


class TableModel(nn.Module):
    """Base class of models whose inputs are columns of a table.

    Attributes
    ----------
    feature_cols : list of str
        Columns that ``forward`` takes, in order. Pass them to ``fit`` of an Estimator.
    """

    def __init__(self, feature_cols: Iterable[str]):
        super().__init__()
        self.feature_cols = list(feature_cols)

    def _checked(self, columns: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(columns) != len(self.feature_cols):
            raise UsageError(
                f"{type(self).__name__} takes {len(self.feature_cols)} columns "
                f"{self.feature_cols}, but got {len(columns)}; pass "
                "feature_cols=model.feature_cols",
                code="model-input",
            )
        return columns


class TabularInput(nn.Module):
    """Input layer that concatenates category embeddings and numbers into one vector per row.

    Parameters
    ----------
    categories : mapping of str to int
        Category columns of integer ids, and their cardinalities.
    numbers : sequence of str
        Numeric columns, which should be scaled.
    dim : int
        Length of an embedding.
    sequences : mapping of str to int
        Columns of id arrays, with 0 as padding; their embeddings are averaged.
    sharded : bool, default False
        Shard the embedding tables over the workers of an Estimator; see
        :class:`~bigdl.orca.torch.ShardedEmbedding`.

    Attributes
    ----------
    feature_cols : list of str
        `categories`, `sequences` and `numbers`, in this order.
    width : int
        Length of the output vector.
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 16,
        sequences: Mapping[str, int] | None = None,
        sharded: bool = False,
    ):
        super().__init__()
        sequences = sequences or {}
        if not categories and not numbers and not sequences:
            raise UsageError(
                "The model has no columns; pass categories or numbers",
                code="argument-missing",
                argument="categories",
            )
        self.feature_cols = [*categories, *sequences, *numbers]
        self.width = (len(categories) + len(sequences)) * dim + len(numbers)
        self._counts = (len(categories), len(sequences))
        self.fields = FieldEmbeddings(categories.values(), dim, sharded) if categories else None
        self.bags = nn.ModuleList(
            FieldEmbeddings([size], dim, sharded) for size in sequences.values()
        )

    def forward(self, columns: Sequence[Tensor]) -> Tensor:
        """Return the input vectors of the rows, of shape ``(n, width)``."""
        first, second = self._counts[0], sum(self._counts)
        parts = []
        if self.fields is not None:
            parts.append(self.fields(columns[:first]).flatten(1))
        for bag, numbers in zip(self.bags, columns[first:second], strict=True):
            parts.append(_mean_of_known(bag, numbers))
        if len(columns) > second:
            dtype = parts[0].dtype if parts else torch.get_default_dtype()
            parts.append(stack_numbers(columns[second:], dtype))
        return torch.cat(parts, 1)


def _mean_of_known(bag: nn.Module, numbers: Tensor) -> Tensor:
    vectors = bag([numbers]).squeeze(-2)
    known = (numbers != 0).unsqueeze(-1).to(vectors.dtype)
    return (vectors * known).sum(1) / known.sum(1).clamp(min=1)


class NCF(TableModel):
    """Neural collaborative filtering (NeuMF), which predicts clicks from user and item ids.

    It combines a product of embeddings (generalised matrix factorisation) with a network on
    separate embeddings: He et al., "Neural Collaborative Filtering", WWW 2017.

    Parameters
    ----------
    user_size, item_size : int
        Largest ids plus 1.
    factors : int, default 16
        Length of the embeddings of the product.
    hidden : sequence of int, default (64, 32, 16)
        Widths of the network. The user and item embeddings of the network are half as long as the
        first width.
    dropout : float, default 0.0
    user, item : str
        Names of the columns.
    sharded : bool, default False
        Shard the embedding tables over the workers of an Estimator; see
        :class:`~bigdl.orca.torch.ShardedEmbedding`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.feature import Feature, FeatureSchema
    >>> from bigdl.friesian.models import NCF
    >>> schema = FeatureSchema({"user": Feature("int", 944), "item": Feature("int", 1683)})
    >>> model = NCF.from_schema(schema, factors=8)
    >>> model(torch.tensor([1, 2, 3]), torch.tensor([7, 8, 9])).shape  # a probability for each row
    torch.Size([3])
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
        sharded: bool = False,
    ):
        super().__init__([user, item])
        sizes, half = (user_size, item_size), hidden[0] // 2
        self.product = FieldEmbeddings(sizes, factors, sharded)
        self.network = FieldEmbeddings(sizes, half, sharded)
        self.hidden = mlp(2 * half, hidden, dropout)
        self.head = nn.Linear(factors + hidden[-1], 1)

    @classmethod
    def from_schema(
        cls, schema: FeatureSchema, user: str = "user", item: str = "item", **options
    ) -> NCF:
        """Build a model whose input sizes come from a table schema.

        Parameters
        ----------
        schema : FeatureSchema
        user, item : str
            Category columns of integer ids.
        **options
            Other arguments of the class.
        """
        sizes = schema.cardinality(user), schema.cardinality(item)
        return cls(*sizes, user=user, item=item, **options)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        """Return probabilities of shape ``(n,)`` for id columns of shape ``(n,)``."""
        pair = (user, item)
        product = self.product(pair).prod(1)
        hidden = self.hidden(self.network(pair).flatten(1))
        return torch.sigmoid(self.head(torch.cat([product, hidden], 1))).squeeze(1)


class WideAndDeep(TableModel):
    """Wide & Deep: click probability from a linear model of crossed columns and a network.

    The linear part memorises crossed categories, the network generalises over embeddings: Cheng et
    al., "Wide & Deep Learning for Recommender Systems", DLRS 2016.

    Parameters
    ----------
    wide : mapping of str to int
        Columns of the linear part, such as those of ``cross_columns``, and their cardinalities.
    categories : mapping of str to int
        Columns to embed for the network; they may also be in `wide`.
    numbers : sequence of str
        Scaled numeric columns for the network.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0
    sharded : bool, default False
        Shard the embedding tables over the workers of an Estimator; see
        :class:`~bigdl.orca.torch.ShardedEmbedding`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import WideAndDeep
    >>> model = WideAndDeep(wide={"user_city": 1000}, categories={"city": 50}, numbers=["age"])
    >>> model.feature_cols
    ['user_city', 'city', 'age']
    >>> model(torch.tensor([17, 3]), torch.tensor([4, 4]), torch.tensor([0.3, 0.7])).shape
    torch.Size([2])
    """

    def __init__(
        self,
        wide: Mapping[str, int],
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        sharded: bool = False,
    ):
        if not wide:
            raise UsageError(
                "wide has no columns; pass those of the linear part",
                code="argument-missing",
                argument="wide",
            )
        super().__init__(dict.fromkeys([*wide, *categories, *numbers]))
        self.linear = FieldEmbeddings(wide.values(), 1, sharded)
        nn.init.zeros_(self.linear.table.weight)
        self.input = TabularInput(categories, numbers, dim, sharded=sharded)
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
        """Build a model whose input sizes come from a table schema.

        Parameters
        ----------
        schema : FeatureSchema
        wide, categories : list of str
            Category columns of integer ids.
        numbers : list of str
        **options
            Other arguments of the class.
        """
        sizes = cardinalities(schema, wide), cardinalities(schema, categories)
        return cls(*sizes, check_numbers(schema, numbers), **options)

    def forward(self, *columns: Tensor) -> Tensor:
        """Return probabilities of shape ``(n,)`` for the columns `feature_cols`."""
        columns = self._checked(columns)
        wide = self.linear([columns[i] for i in self._wide]).sum((1, 2))
        deep = self.head(self.hidden(self.input([columns[i] for i in self._deep]))).squeeze(1)
        return torch.sigmoid(wide + deep)


class FieldsModel(TableModel):
    """Base class of models with category and number columns."""

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        categories: Iterable[str],
        numbers: Iterable[str] = (),
        **options,
    ) -> Self:
        """Build a model whose input sizes come from a table schema.

        Parameters
        ----------
        schema : FeatureSchema
        categories : list of str
            Category columns of integer ids.
        numbers : list of str
        **options
            Other arguments of the class.
        """
        sizes: Any = cardinalities(schema, categories), check_numbers(schema, numbers)
        return cls(*sizes, **options)


class DeepFM(FieldsModel):
    """DeepFM: click probability from pairwise products of column embeddings and a network.

    Guo et al., "DeepFM: A Factorization-Machine based Neural Network for CTR Prediction", IJCAI
    2017. A number is a field; its embedding is a vector times the number.

    Parameters
    ----------
    categories : mapping of str to int
        Category columns of integer ids, and their cardinalities.
    numbers : sequence of str
        Scaled numeric columns.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (128, 64)
    dropout : float, default 0.0
    sharded : bool, default False
        Shard the embedding tables over the workers of an Estimator; see
        :class:`~bigdl.orca.torch.ShardedEmbedding`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import DeepFM
    >>> model = DeepFM(categories={"user": 944, "item": 1683}, numbers=["age"])
    >>> model.feature_cols
    ['user', 'item', 'age']
    >>> model(torch.tensor([1, 2]), torch.tensor([7, 8]), torch.tensor([0.3, 0.7])).shape
    torch.Size([2])
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 16,
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        sharded: bool = False,
    ):
        if not categories:
            raise UsageError(
                "categories has no columns; pass the columns to embed",
                code="argument-missing",
                argument="categories",
            )
        super().__init__([*categories, *numbers])
        self._categories = len(categories)
        self.linear = FieldEmbeddings(categories.values(), 1, sharded)
        nn.init.zeros_(self.linear.table.weight)
        self.fields = FieldEmbeddings(categories.values(), dim, sharded)
        if numbers:
            self.slopes = nn.Parameter(torch.zeros(len(numbers)))
            self.directions = nn.Parameter(torch.randn(len(numbers), dim) * 0.05)
        self.bias = nn.Parameter(torch.zeros(()))
        self.hidden = mlp(len(self.feature_cols) * dim, hidden, dropout)
        self.head = nn.Linear(hidden[-1], 1)

    def forward(self, *columns: Tensor) -> Tensor:
        """Return probabilities of shape ``(n,)`` for the columns `feature_cols`."""
        columns = self._checked(columns)
        categories, numbers = columns[: self._categories], columns[self._categories :]
        first = self.bias + self.linear(categories).sum((1, 2))
        fields = self.fields(categories)
        if numbers:
            values = stack_numbers(numbers, fields.dtype)
            first = first + values @ self.slopes
            fields = torch.cat([fields, values.unsqueeze(-1) * self.directions], 1)
        # sum of all pairwise products = (square of the sum − sum of the squares) / 2
        pairs = (fields.sum(1).square() - fields.square().sum(1)).sum(1) / 2
        deep = self.head(self.hidden(fields.flatten(1))).squeeze(1)
        return torch.sigmoid(first + pairs + deep)


class DotInteraction(nn.Module):
    """Layer that appends the pairwise dot products of a row's vectors to the first vector.

    DLRM combines numbers and embeddings in this way (Naumov et al., "Deep Learning Recommendation
    Model for Personalization and Recommendation Systems", 2019). Products are symmetric, so the
    backward pass needs one matrix product and no scattered additions.

    Parameters
    ----------
    fields : int
        Number of vectors in addition to the first one.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import DotInteraction
    >>> DotInteraction(2)(torch.tensor([[1.0, 2.0]]), torch.tensor([[[3.0, 4.0], [5.0, 6.0]]]))
    tensor([[ 1.,  2., 11., 17., 39.]])
    """

    if TYPE_CHECKING:  # TorchScript evaluates class annotations
        pairs: Tensor
        pair_index: Tensor

    def __init__(self, fields: int):
        super().__init__()
        vectors = fields + 1
        row, column = torch.tril_indices(vectors, vectors, -1)
        # index of each product among the pairs; products of a vector with itself have no index
        pair_index = torch.full((vectors, vectors), len(row))
        pair_index[row, column] = pair_index[column, row] = torch.arange(len(row))
        self.register_buffer("pairs", row * vectors + column, persistent=False)
        self.register_buffer("pair_index", pair_index.flatten(), persistent=False)

    def forward(self, first: Tensor, fields: Tensor) -> Tensor:
        """Return a matrix ``(n, dim + pairs)`` for ``(n, dim)`` and ``(n, fields, dim)`` inputs."""
        vectors = torch.cat([first.unsqueeze(1), fields], 1)
        if torch.is_grad_enabled() and vectors.requires_grad and not torch.jit.is_scripting():
            products = _PairProducts.apply(vectors, self.pairs, self.pair_index)
        else:
            products = pair_products(vectors, self.pairs)
        return torch.cat([first, products], 1)


def pair_products(vectors: Tensor, pairs: Tensor) -> Tensor:
    """Return the dot products of each row's vectors at indices `pairs` of the flat Gram matrix."""
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    return products.gather(1, pairs.expand(products.size(0), -1))


class _PairProducts(torch.autograd.Function):
    """Autograd version of :func:`pair_products` with a symmetric backward pass."""

    @staticmethod
    def forward(ctx: FunctionCtx, vectors: Tensor, pairs: Tensor, pair_index: Tensor) -> Tensor:
        ctx.save_for_backward(vectors, pair_index)
        return pair_products(vectors, pairs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        vectors, pair_index = ctx.saved_tensors
        symmetric = F.pad(gradient, (0, 1)).index_select(1, pair_index)
        return symmetric.view(*vectors.shape[:2], -1) @ vectors, None, None


class DLRM(FieldsModel):
    """DLRM: click probability from pairwise products of embeddings and a network.

    Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
    Systems", 2019.

    Parameters
    ----------
    categories : mapping of str to int
        Category columns of integer ids, and their cardinalities.
    numbers : sequence of str
        Scaled numeric columns, at least one.
    dim : int, default 16
        Length of an embedding, and of the vector of the numbers.
    bottom : sequence of int, default (64,)
        Widths of the network that maps the numbers to a vector.
    hidden : sequence of int, default (128, 64)
        Widths of the network after the products.
    dropout : float, default 0.0
    sharded : bool, default False
        Shard the embedding tables over the workers of an Estimator; see
        :class:`~bigdl.orca.torch.ShardedEmbedding`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import DLRM
    >>> model = DLRM(categories={"user": 944, "item": 1683}, numbers=["age"])
    >>> model(torch.tensor([1, 2]), torch.tensor([7, 8]), torch.tensor([0.3, 0.7])).shape
    torch.Size([2])
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str],
        dim: int = 16,
        bottom: Sequence[int] = (64,),
        hidden: Sequence[int] = (128, 64),
        dropout: float = 0.0,
        sharded: bool = False,
    ):
        for name, columns in (("categories", categories), ("numbers", numbers)):
            if not columns:
                raise UsageError(
                    f"{name} has no columns; DLRM needs both, DeepFM categories only",
                    code="argument-missing",
                    argument=name,
                )
        super().__init__([*categories, *numbers])
        self._categories = len(categories)
        self.fields = FieldEmbeddings(categories.values(), dim, sharded)
        self.bottom = mlp(len(numbers), [*bottom, dim], dropout)
        self.interaction = DotInteraction(len(categories))
        self.hidden = mlp(dim + len(self.interaction.pairs), hidden, dropout)
        self.head = nn.Linear(hidden[-1], 1)

    def forward(self, *columns: Tensor) -> Tensor:
        """Return probabilities of shape ``(n,)`` for the columns `feature_cols`."""
        columns = self._checked(columns)
        fields = self.fields(columns[: self._categories])
        first = self.bottom(stack_numbers(columns[self._categories :], fields.dtype))
        return torch.sigmoid(self.head(self.hidden(self.interaction(first, fields)))).squeeze(1)


class MMoE(TableModel):
    """Multi-gate mixture of experts, which predicts one probability per task.

    Ma et al., "Modeling Task Relationships in Multi-task Learning with Multi-gate
    Mixture-of-Experts", KDD 2018.

    Parameters
    ----------
    categories : mapping of str to int
        Category columns of integer ids, and their cardinalities.
    numbers : sequence of str
        Scaled numeric columns.
    tasks : sequence of str
        Names of the tasks, which are the keys of the output.
    dim : int, default 16
        Length of an embedding.
    experts : int, default 4
    expert_hidden : sequence of int, default (64,)
        Widths of each expert network.
    tower_hidden : sequence of int, default (32,)
        Widths of the network of each task.
    dropout : float, default 0.0
    sharded : bool, default False
        Shard the embedding tables over the workers of an Estimator; see
        :class:`~bigdl.orca.torch.ShardedEmbedding`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import MMoE
    >>> model = MMoE(categories={"user": 944, "item": 1683}, tasks=["click", "purchase"], experts=2)
    >>> users, items = torch.tensor([1, 2]), torch.tensor([7, 8])
    >>> {task: scores.shape for task, scores in model(users, items).items()}
    {'click': torch.Size([2]), 'purchase': torch.Size([2])}
    >>> model.mixtures(users, items).shape  # rows, tasks, experts
    torch.Size([2, 2, 2])
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
        sharded: bool = False,
    ):
        if isinstance(tasks, str) or not tasks:
            raise UsageError(
                f"tasks should be a list of names, got {tasks!r}",
                code="argument-type",
                argument="tasks",
            )
        table = TabularInput(categories, numbers, dim, sharded=sharded)
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
        """Build a model whose input sizes come from a table schema.

        Parameters
        ----------
        schema : FeatureSchema
        categories : list of str
            Category columns of integer ids.
        numbers, tasks : list of str
        **options
            Other arguments of the class.
        """
        sizes = cardinalities(schema, categories)
        return cls(sizes, check_numbers(schema, numbers), tasks, **options)

    def mixtures(self, *columns: Tensor) -> Tensor:
        """Return the weights of the experts for each task, of shape ``(n, tasks, experts)``."""
        return self._mixtures(self.input(self._checked(columns)))

    def _mixtures(self, rows: Tensor) -> Tensor:
        return torch.stack([gate(rows) for gate in self.gates], 1).softmax(-1)

    def forward(self, *columns: Tensor) -> dict[str, Tensor]:
        """Return a dict from tasks to probabilities of shape ``(n,)`` for `feature_cols`."""
        rows = self.input(self._checked(columns))
        expert_outputs = torch.stack([expert(rows) for expert in self.experts], 1)
        mixed = self._mixtures(rows) @ expert_outputs
        outputs = [tower(mixed[:, i]).squeeze(1) for i, tower in enumerate(self.towers)]
        return {task: torch.sigmoid(each) for task, each in zip(self.tasks, outputs, strict=True)}


class MultiTaskLoss(nn.Module):
    """Weighted sum of the binary cross-entropies of all tasks.

    Parameters
    ----------
    weights : sequence of float, optional
        Weights of the tasks; default 1.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import MultiTaskLoss
    >>> outputs = {"click": torch.tensor([0.5]), "purchase": torch.tensor([0.5])}
    >>> loss = MultiTaskLoss(weights=[1.0, 2.0])
    >>> loss(outputs, torch.tensor([1.0]), torch.tensor([0.0]))  # log 2 + 2 log 2
    tensor(2.0794)
    """

    def __init__(self, weights: Sequence[float] | None = None):
        super().__init__()
        self.weights = None if weights is None else [float(weight) for weight in weights]

    def forward(self, outputs: Mapping[str, Tensor], *targets: Tensor) -> Tensor:
        """Return the loss, averaged over the rows.

        Parameters
        ----------
        outputs : dict of str to Tensor of shape (n,)
        *targets : Tensor of shape (n,)
            In the order of the tasks.
        """
        weights = self.weights or [1.0] * len(outputs)
        if not len(outputs) == len(targets) == len(weights):
            raise UsageError(
                f"The model has the tasks {list(outputs)}, but got {len(targets)} label_cols and "
                f"{len(weights)} weights; pass one per task",
                code="model-output",
            )
        losses = [
            weight * F.binary_cross_entropy(output, target.reshape(output.shape).to(output.dtype))
            for weight, output, target in zip(weights, outputs.values(), targets, strict=True)
        ]
        return torch.stack(losses).sum()


class Tower(TableModel):
    """Network that maps the columns of a user or an item to a unit-length vector.

    Parameters
    ----------
    categories : mapping of str to int
        Category columns of integer ids, and their cardinalities.
    numbers : sequence of str
        Scaled numeric columns.
    dim : int, default 32
        Length of an embedding, and of the vector.
    hidden : sequence of int, default (64,)
    sequences : mapping of str to int
        Columns of id arrays, with 0 as padding; their embeddings are averaged.
    sharded : bool, default False
        Shard the embedding tables over the workers of an Estimator; see
        :class:`~bigdl.orca.torch.ShardedEmbedding`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import Tower
    >>> tower = Tower({"item": 1683}, numbers=["price"], dim=8)
    >>> vectors = tower(torch.tensor([7, 8]), torch.tensor([0.3, 0.7]))
    >>> vectors.shape, [round(length, 3) for length in vectors.norm(dim=1).tolist()]
    (torch.Size([2, 8]), [1.0, 1.0])
    """

    def __init__(
        self,
        categories: Mapping[str, int],
        numbers: Sequence[str] = (),
        dim: int = 32,
        hidden: Sequence[int] = (64,),
        sequences: Mapping[str, int] | None = None,
        sharded: bool = False,
    ):
        table = TabularInput(categories, numbers, dim, sequences, sharded)
        super().__init__(table.feature_cols)
        self.input = table
        self.hidden = mlp(table.width, hidden)
        self.head = nn.Linear(hidden[-1] if hidden else table.width, dim)

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        categories: Iterable[str],
        numbers: Iterable[str] = (),
        sequences: Iterable[str] = (),
        **options,
    ) -> Self:
        """Build a tower whose input sizes come from a table schema.

        Parameters
        ----------
        schema : FeatureSchema
        categories, numbers, sequences : list of str
        **options
            Other arguments of the class.
        """
        return cls(
            cardinalities(schema, categories),
            check_numbers(schema, numbers),
            sequences=cardinalities(schema, sequences),
            **options,
        )

    def forward(self, *columns: Tensor) -> Tensor:
        """Return vectors of shape ``(n, dim)`` for the columns `feature_cols`."""
        vectors = self.head(self.hidden(self.input(self._checked(columns))))
        return F.normalize(vectors, dim=1)


class TwoTower(TableModel):
    """Two-tower model: user and item vectors whose dot product is the score.

    Each tower is a separate model, so that item vectors can be stored and searched
    (Covington et al., "Deep Neural Networks for YouTube Recommendations", RecSys 2016).

    Parameters
    ----------
    user, item : Tower

    Attributes
    ----------
    user, item : Tower

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import Tower, TwoTower
    >>> model = TwoTower(Tower({"user": 944}, dim=8), Tower({"item": 1683}, dim=8))
    >>> users, items = model(torch.tensor([1, 2]), torch.tensor([7, 8]))
    >>> (users * items).sum(1).shape  # score of each pair
    torch.Size([2])
    >>> model.item(torch.arange(1683)).shape  # vectors of all items, for an index
    torch.Size([1683, 8])
    """

    def __init__(self, user: Tower, item: Tower):
        super().__init__([*user.feature_cols, *item.feature_cols])
        self.user, self.item = user, item

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        user: Iterable[str],
        item: Iterable[str],
        user_numbers: Iterable[str] = (),
        item_numbers: Iterable[str] = (),
        user_sequences: Iterable[str] = (),
        **options,
    ) -> TwoTower:
        """Build a model whose input sizes come from a table schema.

        Parameters
        ----------
        schema : FeatureSchema
        user, item : list of str
            Category columns of integer ids.
        user_numbers, item_numbers : list of str
        user_sequences : list of str
            Array columns, such as histories.
        **options
            Other arguments of both towers.
        """
        return cls(
            Tower.from_schema(schema, user, user_numbers, user_sequences, **options),
            Tower.from_schema(schema, item, item_numbers, **options),
        )

    def forward(self, *columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return user and item vectors, of shape ``(n, dim)`` each."""
        columns = self._checked(columns)
        users = len(self.user.feature_cols)
        return self.user(*columns[:users]), self.item(*columns[users:])


class InBatchSoftmax(nn.Module):
    """Softmax loss with the other items of the batch as negatives.

    Frequent items occur more often as negatives. To correct for that, the loss subtracts the log
    probability of each item (Yi et al., "Sampling-Bias-Corrected Neural Modeling for Large Corpus
    Item Recommendations", RecSys 2019). The target is the item id, so the same item in another row
    is not a negative. With several workers, negatives come from the worker's local batch.

    Parameters
    ----------
    temperature : float, default 0.1
        Divisor of the dot products.
    item_counts : sequence of number, optional
        Number of occurrences of each item id in the data. Without it nothing is subtracted.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import InBatchSoftmax
    >>> users = items = torch.eye(2)  # each user has the vector of the matching item
    >>> loss = InBatchSoftmax(temperature=0.1)
    >>> loss(users, items, torch.tensor([7, 8])) < loss(users, items.flip(0), torch.tensor([7, 8]))
    tensor(True)
    """

    if TYPE_CHECKING:  # TorchScript evaluates class annotations
        log_share: Tensor | None

    def __init__(self, temperature: float = 0.1, item_counts: Sequence[float] | None = None):
        super().__init__()
        if not temperature > 0:
            raise UsageError(
                f"temperature should be a number above 0, got {temperature!r}",
                code="argument-value",
                argument="temperature",
            )
        self.temperature = temperature
        if item_counts is None:
            self.register_buffer("log_share", None)
        else:
            counts = torch.as_tensor(item_counts, dtype=torch.float32).clamp(min=1)
            self.register_buffer("log_share", torch.log(counts / counts.sum()))

    def forward(self, user: Tensor, item: Tensor, number: Tensor) -> Tensor:
        """Return the loss, averaged over the rows.

        Parameters
        ----------
        user, item : Tensor of shape (n, dim)
        number : Tensor of shape (n,)
            Item ids.
        """
        number = number.reshape(-1).to(torch.int64)
        logits = user @ item.T / self.temperature
        if self.log_share is not None:
            logits = logits - self.log_share[number]
        row = torch.arange(len(number), device=number.device)
        is_repeat = (number[:, None] == number) & (row[:, None] != row)
        return F.cross_entropy(logits.masked_fill(is_repeat, torch.finfo(logits.dtype).min), row)


class AUGRU(nn.Module):
    """GRU whose update gate is multiplied by the attention weight of each step.

    Parameters
    ----------
    width : int
        Width of the inputs and of the state.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import AUGRU
    >>> interests = torch.ones(1, 3, 4)  # one user, three steps, vectors of length 4
    >>> AUGRU(4)(interests, torch.zeros(1, 3))  # without attention the state stays 0
    tensor([[0., 0., 0., 0.]]...)
    """

    def __init__(self, width: int):
        super().__init__()
        self.of_input = nn.Linear(width, 3 * width)
        self.of_state = nn.Linear(width, 3 * width)

    def forward(self, inputs: Tensor, attention: Tensor) -> Tensor:
        """Return the last hidden state of each sequence.

        Parameters
        ----------
        inputs : Tensor of shape (n, steps, width)
        attention : Tensor of shape (n, steps)
            Weight 0 leaves the state unchanged.

        Returns
        -------
        Tensor of shape (n, width)
        """
        state = torch.zeros_like(inputs[:, 0])
        for step, weight in zip(
            self.of_input(inputs).unbind(1), attention.unsqueeze(-1).unbind(1), strict=True
        ):
            reset, update, new = step.chunk(3, -1)
            state_reset, state_update, state_new = self.of_state(state).chunk(3, -1)
            update = weight * torch.sigmoid(update + state_update)
            new = torch.tanh(new + torch.sigmoid(reset + state_reset) * state_new)
            state = (1 - update) * state + update * new
        return state


class DIEN(TableModel):
    """Deep interest evolution network, which predicts click probabilities from user histories.

    A GRU reads the history. An attention layer compares its states with the target item, and a
    second GRU (:class:`AUGRU`) follows the interests that matter for it: Zhou et al., "Deep
    Interest Evolution Network for Click-Through Rate Prediction", AAAI 2019. In training, the
    states of the first GRU also learn to distinguish the next item of the history from negatives.

    Parameters
    ----------
    targets : mapping of str to int
        Columns of the target item, such as item id and category, and their cardinalities.
    histories : sequence of str
        Array columns with the histories of `targets`, in the same order, padded at the end.
    mask : str
        Array column with 1 for each value of a history and 0 for padding.
    negatives : sequence of str
        Array columns, or columns of arrays of arrays, with negatives for `histories`. They are
        inputs in training only.
    profile : mapping of str to int, optional
        Further category columns, such as the user.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (80, 40)
    sharded : bool, default False
        Shard the embedding tables over the workers of an Estimator; see
        :class:`~bigdl.orca.torch.ShardedEmbedding`.

    Attributes
    ----------
    feature_cols : list of str
        `profile`, `targets`, `histories`, `mask` and `negatives`.
    predict_cols : list of str
        `feature_cols` without `negatives`, for ``evaluate`` and ``predict``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import DIEN
    >>> model = DIEN({"item": 100}, ["item_hist_seq"], "item_mask", profile={"user": 10}).eval()
    >>> model.predict_cols
    ['user', 'item', 'item_hist_seq', 'item_mask']
    >>> history, mask = torch.tensor([[3, 5, 0]]), torch.tensor([[1, 1, 0]])
    >>> model(torch.tensor([1]), torch.tensor([7]), history, mask).shape
    torch.Size([1])
    """

    def __init__(
        self,
        targets: Mapping[str, int],
        histories: Sequence[str],
        mask: str,
        negatives: Sequence[str] = (),
        profile: Mapping[str, int] | None = None,
        dim: int = 16,
        hidden: Sequence[int] = (80, 40),
        sharded: bool = False,
    ):
        profile = profile or {}
        if len(histories) != len(targets) or (negatives and len(negatives) != len(targets)):
            raise UsageError(
                "histories and negatives should have a column for each of targets, but got "
                f"{list(histories)} and {list(negatives)} for {list(targets)}",
                code="argument-value",
                argument="histories",
            )
        predict_cols = [*profile, *targets, *histories, mask]
        super().__init__([*predict_cols, *negatives])
        self.predict_cols = predict_cols
        self._counts = [len(profile), len(targets), len(histories), 1, len(negatives)]
        width = len(targets) * dim
        self.items = FieldEmbeddings(targets.values(), dim, sharded)
        self.profile = FieldEmbeddings(profile.values(), dim, sharded) if profile else None
        self.interests = nn.GRU(width, width, batch_first=True)
        self.compare = nn.Linear(width, width, bias=False)
        self.evolution = AUGRU(width)
        self.hidden = mlp(len(profile) * dim + 2 * width, hidden, activation=nn.PReLU)
        self.head = nn.Linear(hidden[-1], 1)

    @classmethod
    def from_schema(
        cls,
        schema: FeatureSchema,
        targets: Sequence[str],
        histories: Sequence[str],
        mask: str,
        negatives: Sequence[str] = (),
        profile: Iterable[str] = (),
        **options,
    ) -> DIEN:
        """Build a model whose input sizes come from a table schema.

        Parameters
        ----------
        schema : FeatureSchema
            The arrays must be of one length.
        targets, histories, negatives, profile : list of str
        mask : str
        **options
            Other arguments of the class.
        """
        lengths = {name: schema.length(name) for name in [*histories, mask, *negatives]}
        if len(set(lengths.values())) > 1:
            raise UsageError(
                f"The arrays should have one length, but have {lengths}; pad them",
                code="data-shape",
                columns=list(lengths),
            )
        sizes = cardinalities(schema, targets)
        for others in (histories, negatives):  # some items occur in histories only
            for target, name in zip(targets, others, strict=False):
                sizes[target] = max(sizes[target], schema.cardinality(name))
        profiles = cardinalities(schema, profile)
        return cls(sizes, histories, mask, negatives, profiles, **options)

    def attention(self, interests: Tensor, item: Tensor, mask: Tensor) -> Tensor:
        """Return the attention weight of each history step for the target item.

        Parameters
        ----------
        interests : Tensor of shape (n, steps, width)
        item : Tensor of shape (n, width)
        mask : Tensor of shape (n, steps)

        Returns
        -------
        Tensor of shape (n, steps)
            Each row sums to 1; padding has weight 0, and an empty history has only zeros.
        """
        scores = (self.compare(interests) @ item.unsqueeze(-1)).squeeze(-1)
        present = mask > 0
        scores = scores.masked_fill(~present, torch.finfo(scores.dtype).min)
        return scores.softmax(1) * present

    def forward(self, *columns: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return probabilities for the columns `feature_cols` (with negatives) or `predict_cols`.

        Returns
        -------
        Tensor of shape (n,)
            In training with negatives also the interest loss, of shape (n,); see
            :class:`InterestLoss`.
        """
        if len(columns) != len(self.predict_cols):
            columns = self._checked(columns)
        profile, target, histories, (mask,), negatives = self._groups(columns)
        item = self.items(target).flatten(1)
        history = self.items(histories).flatten(2)
        interests, _ = self.interests(history)
        attention = self.attention(interests, item, mask)
        parts = [item, self.evolution(interests, attention)]
        if self.profile is not None:
            parts.append(self.profile(profile).flatten(1))
        output = torch.sigmoid(self.head(self.hidden(torch.cat(parts, 1)))).squeeze(1)
        if not (self.training and negatives):
            return output
        return output, self._interest_loss(interests, history, self.items(negatives), mask)

    def _groups(self, columns: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        remaining = iter(columns)
        return [list(islice(remaining, count)) for count in self._counts]

    def _interest_loss(
        self, interests: Tensor, history: Tensor, negatives: Tensor, mask: Tensor
    ) -> Tensor:
        """Return each row's mean cross-entropy of the next history items against the negatives."""
        others = negatives.flatten(-2)
        if others.ndim == 3:
            others = others.unsqueeze(2)
        states = interests[:, :-1]
        chosen = (states * history[:, 1:]).sum(-1)
        unchosen = (states.unsqueeze(2) * others[:, 1:]).sum(-1)
        losses = -F.logsigmoid(chosen) - F.logsigmoid(-unchosen).mean(-1)
        present = (mask[:, 1:] > 0).to(losses.dtype)
        return (losses * present).sum(1) / present.sum(1).clamp(min=1)


class InterestLoss(nn.Module):
    """Loss of :class:`DIEN`: binary cross-entropy, plus the interest loss in training.

    Parameters
    ----------
    weight : float, default 1.0
        Weight of the interest loss.

    Examples
    --------
    >>> import torch
    >>> from bigdl.friesian.models import InterestLoss
    >>> probability, target = torch.tensor([0.5]), torch.tensor([1.0])
    >>> InterestLoss()(probability, target)  # log 2
    tensor(0.6931)
    >>> interests = torch.tensor([0.3])  # second output of DIEN in training
    >>> InterestLoss(weight=0.5)(probability, interests, target)
    tensor(0.8431)
    """

    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.weight = float(weight)

    def forward(self, output: Tensor, *rest: Tensor) -> Tensor:
        """Return the mean loss; `rest` is the target, preceded in training by the interest loss."""
        *interests, target = rest
        target = target.reshape(output.shape).to(output.dtype)
        loss = F.binary_cross_entropy(output, target)
        return loss + self.weight * interests[0].mean() if interests else loss
