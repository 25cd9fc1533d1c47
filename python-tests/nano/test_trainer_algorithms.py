"""Selective backpropagation, and Adam for sparse and dense gradients."""

import pytest
import torch
from refusals import refused
from torch import nn
from torch.utils.data import DataLoader
from training_models import OneWeight, Regression, table, trainer

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.algorithms import SelectiveBackprop
from bigdl.nano.pytorch.algorithms.selective_backprop import (
    select_using_loss,
    should_selective_backprop,
)
from bigdl.nano.pytorch.optim import SparseAdam


class Rows(Regression):
    """Keeps how many rows each training step gets."""

    def training_step(self, batch, batch_idx):
        assert self.training
        self.diary.append(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self):
        pass


def test_batches_are_pruned_between_two_moments_but_for_each_second():
    module = Rows()
    algorithm = SelectiveBackprop(0.5, 0.75, keep=0.25, loss_fn=nn.functional.mse_loss)
    run = trainer(max_epochs=4, algorithms=[algorithm])
    run.fit(module, DataLoader(table(32), batch_size=8), DataLoader(table(8), batch_size=8))
    assert module.diary == [8] * 8 + [2, 8, 2, 8] + [8] * 4
    assert "on_after_batch_transfer" not in vars(module)


def test_the_loss_of_the_module_is_found():
    module = Rows()
    module.criterion = nn.MSELoss()
    algorithm = SelectiveBackprop(0, 1, keep=0.5, interrupt=0)
    trainer(max_epochs=1, algorithms=[algorithm]).fit(module, DataLoader(table(8), batch_size=8))
    assert module.diary == [4]
    assert module.criterion.reduction == "mean"


@pytest.mark.parametrize(
    ("done", "batch", "interrupt", "pruned"),
    [
        *((0.49, 0, 2, False), (0.5, 0, 2, True), (0.89, 2, 2, True), (0.9, 0, 2, False)),
        *((0.6, 1, 2, False), (0.6, 1, 0, True), (0.6, 2, 3, False), (0.6, 3, 3, True)),
    ],
)
def test_when_a_batch_is_pruned(done, batch, interrupt, pruned):
    assert should_selective_backprop(done, batch, interrupt=interrupt) is pruned


def test_samples_with_a_high_loss_are_drawn_more_often():
    net = OneWeight()
    x = torch.arange(1.0, 9.0)[:, None]
    torch.manual_seed(0)
    drawn = torch.zeros(8)
    for _ in range(400):
        inputs, target = select_using_loss((x, torch.zeros(8, 1)), net, nn.functional.mse_loss)
        assert len(inputs) == len(target) == len(set(inputs.flatten().tolist())) == 4
        drawn[inputs.flatten().long() - 1] += 1
    assert torch.all(drawn[4:] > drawn[:4])
    assert net.training


def test_losses_are_computed_on_smaller_images():
    sizes = []

    class Watching(nn.Module):
        def forward(self, x):
            sizes.append(x.shape[2:])
            return x.mean((1, 2, 3))

    batch = [torch.rand(4, 3, 8, 8), torch.rand(4)]
    kept = select_using_loss(batch, Watching(), nn.functional.mse_loss, scale_factor=0.5)
    assert sizes == [(4, 4)]
    assert isinstance(kept, list)
    assert kept[0].shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"start": 0.9, "end": 0.5}, ("argument-value", "0", "1")),
        ({"keep": 0}, ("argument-value", "0")),
        ({"scale_factor": 2}, ("argument-value", "scale_factor", "0")),
        ({"interrupt": -1}, ("argument-value",)),
    ],
    ids=["moments", "keep", "scale", "interrupt"],
)
def test_values_out_of_their_range_are_errors(arguments, said):
    with refused(*said):
        SelectiveBackprop(**arguments)


def test_a_loss_and_a_target_are_needed():
    with refused("argument-missing", "loss_fn"):
        trainer(max_epochs=1, algorithms=[SelectiveBackprop()]).fit(Rows(), DataLoader(table(4)))
    with refused("data-structure"):
        select_using_loss(torch.ones(3), OneWeight(), nn.functional.mse_loss)


# --- SparseAdam


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return nn.Parameter(torch.randn(6, 3, generator=generator))


def test_dense_gradients_get_adam():
    ours, theirs = parameters(), parameters()
    optimizers = SparseAdam([ours], lr=0.1), torch.optim.Adam([theirs], lr=0.1)
    for step in range(5):
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = parameters(step + 1).detach()
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_sparse_gradients_get_the_lazy_adam_of_pytorch():
    ours, theirs = parameters(), parameters()
    optimizers = SparseAdam([ours], lr=0.1), torch.optim.SparseAdam([theirs], lr=0.1)
    for step in range(5):
        rows = torch.tensor([[step % 6, 2, 2]])
        values = parameters(step + 1).detach()[:3]
        for parameter, optimizer in zip((ours, theirs), optimizers, strict=True):
            parameter.grad = torch.sparse_coo_tensor(rows, values, (6, 3))
            optimizer.step()
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(ours[5], parameters()[5])


def test_one_optimizer_trains_embeddings_and_layers():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Flatten(), nn.Linear(8, 1))
    optimizer = SparseAdam(net.parameters(), lr=0.05)
    words = torch.randint(10, (64, 2))
    target = (words.sum(1, keepdim=True) > 9).float()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(net(words), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]
    again = SparseAdam(net.parameters())
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == 0.05


@pytest.mark.parametrize(
    "arguments", [{"lr": 0}, {"eps": -1.0}, {"betas": (0.9, 1.0)}], ids=["lr", "eps", "betas"]
)
def test_wrong_values_of_the_optimizer_are_errors(arguments):
    with pytest.raises(UsageError, match=rf"{next(iter(arguments))}.* should be"):
        SparseAdam([parameters()], **arguments)
