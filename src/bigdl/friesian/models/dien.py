"""Deep interest evolution network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bigdl.common.errors import UsageError
from bigdl.friesian.models.layers import FieldEmbeddings, TableModel, mlp
from bigdl.friesian.ops.schema import FeatureSchema, cardinalities


class AUGRU(nn.Module):
    """A GRU whose update gate is multiplied by the attention that a step gets.

    Parameters
    ----------
    width : int
        Of the inputs and of the state.
    """

    def __init__(self, width: int):
        super().__init__()
        self.of_input = nn.Linear(width, 3 * width)
        self.of_state = nn.Linear(width, 3 * width)

    def forward(self, inputs: Tensor, attention: Tensor) -> Tensor:
        """The last state.

        Parameters
        ----------
        inputs : Tensor of shape (n, steps, width)
        attention : Tensor of shape (n, steps)
            Where it is 0 the state stays as it is.

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
    """The probability that a user chooses an item, by how her interests evolved towards it.

    A GRU reads the history of a user; an attention compares its states with the item, and a second
    GRU (:class:`AUGRU`) follows the interests that matter for it: Zhou et al., "Deep Interest
    Evolution Network for Click-Through Rate Prediction", AAAI 2019.  While training, the states of
    the first GRU also learn to tell the next item of the history from one that was not chosen.

    Parameters
    ----------
    targets : mapping of str to int
        Columns of the item, such as its number and that of its category, and how many there are.
    histories : sequence of str
        Columns of arrays of the same things, in the same order, padded at their end.
    mask : str
        Column of arrays with 1 for each value of a history and 0 for padding.
    negatives : sequence of str
        Columns of arrays, or of arrays of arrays, of the same things that were not chosen.  They
        are inputs of the training only.
    profile : mapping of str to int, optional
        More columns of whole numbers, such as the user.
    dim : int, default 16
        Length of an embedding.
    hidden : sequence of int, default (80, 40)

    Attributes
    ----------
    feature_cols : list of str
        `profile`, `targets`, `histories`, `mask` and `negatives`.
    predict_cols : list of str
        The same without `negatives`: what ``evaluate`` and ``predict`` need.
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
    ):
        profile = profile or {}
        if len(histories) != len(targets) or (negatives and len(negatives) != len(targets)):
            raise UsageError(
                "histories and negatives should have a column for each of targets, but got "
                f"{list(histories)} and {list(negatives)} for {list(targets)}"
            )
        predict_cols = [*profile, *targets, *histories, mask]
        super().__init__([*predict_cols, *negatives])
        self.predict_cols = predict_cols
        self._counts = [len(profile), len(targets), len(histories), 1, len(negatives)]
        width = len(targets) * dim
        self.items = FieldEmbeddings(targets.values(), dim)
        self.profile = FieldEmbeddings(profile.values(), dim) if profile else None
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
        """A model of the size of a table.

        Parameters
        ----------
        schema : FeatureSchema
            The arrays must be of one length.
        targets, histories, negatives, profile : list of str
        mask : str
        **options
            Of the class.
        """
        lengths = {name: schema.length(name) for name in [*histories, mask, *negatives]}
        if len(set(lengths.values())) > 1:
            raise UsageError(f"The arrays should have one length, but have {lengths}; pad them")
        sizes = cardinalities(schema, targets)
        for others in (histories, negatives):  # an item may occur in histories only
            for target, name in zip(targets, others, strict=False):
                sizes[target] = max(sizes[target], schema.cardinality(name))
        profiles = cardinalities(schema, profile)
        return cls(sizes, histories, mask, negatives, profiles, **options)

    def attention(self, interests: Tensor, item: Tensor, mask: Tensor) -> Tensor:
        """Return the weight of each step of a history for the item.

        Parameters
        ----------
        interests : Tensor of shape (n, steps, width)
        item : Tensor of shape (n, width)
        mask : Tensor of shape (n, steps)

        Returns
        -------
        Tensor of shape (n, steps)
            The sum of a row is 1; 0 for padding, and for all of an empty history.
        """
        scores = (self.compare(interests) @ item.unsqueeze(-1)).squeeze(-1)
        present = mask > 0
        scores = scores.masked_fill(~present, torch.finfo(scores.dtype).min)
        return scores.softmax(1) * present

    def forward(self, *columns: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Probabilities for the columns `feature_cols`, or without negatives `predict_cols`.

        Returns
        -------
        Tensor of shape (n,)
            While training with negatives also the loss of the interests, of shape (n,); see
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
        rest = iter(columns)
        return [list(islice(rest, count)) for count in self._counts]

    def _interest_loss(
        self, interests: Tensor, history: Tensor, negatives: Tensor, mask: Tensor
    ) -> Tensor:
        """Of each row the mean cross-entropy of telling the next item from others."""
        others = negatives.flatten(-2)
        if others.ndim == 3:
            others = others.unsqueeze(2)
        states = interests[:, :-1]
        chosen = (states * history[:, 1:]).sum(-1)
        unchosen = (states.unsqueeze(2) * others[:, 1:]).sum(-1)
        losses = -F.logsigmoid(chosen) - F.logsigmoid(-unchosen).mean(-1)
        there = (mask[:, 1:] > 0).to(losses.dtype)
        return (losses * there).sum(1) / there.sum(1).clamp(min=1)


class InterestLoss(nn.Module):
    """Binary cross-entropy of :class:`DIEN`, with the loss of the interests while it trains.

    Parameters
    ----------
    weight : float, default 1.0
        Of the loss of the interests.
    """

    def __init__(self, weight: float = 1.0):
        super().__init__()
        self.weight = float(weight)

    def forward(self, output: Tensor, *rest: Tensor) -> Tensor:
        """The mean over the rows, of ``output, target`` or ``output, interests, target``."""
        *interests, target = rest
        target = target.reshape(output.shape).to(output.dtype)
        loss = F.binary_cross_entropy(output, target)
        return loss + self.weight * interests[0].mean() if interests else loss
