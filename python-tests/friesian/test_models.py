"""Tests of PyTorch recommender models: shapes, gradients, convergence and export."""

import pytest
import torch
from refusals import refused
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.friesian.feature import Feature, FeatureSchema
from bigdl.friesian.models import (
    AUGRU,
    DIEN,
    DLRM,
    NCF,
    DeepFM,
    DotInteraction,
    InBatchSoftmax,
    InterestLoss,
    MMoE,
    MultiTaskLoss,
    Tower,
    TwoTower,
    WideAndDeep,
)
from bigdl.orca.torch import ShardedEmbedding

STEPS = 6
SCHEMA = FeatureSchema(
    {
        "user": Feature("int", 12),
        "item": Feature("int", 9),
        "category": Feature("int", 4),
        "item_history": Feature("int", 10, (STEPS,)),
        "category_history": Feature("int", 4, (STEPS,)),
        "mask": Feature("int", 2, (STEPS,)),
        "neg_item_history": Feature("int", 9, (STEPS, 2)),
        "neg_category_history": Feature("int", 4, (STEPS, 2)),
        "ragged": Feature("int", 9, (None,)),
        "cross": Feature("int", 50),
        "price": Feature("float"),
        "age": Feature("double"),
        "city": Feature("string"),
    }
)
NUMBERS = ["price", "age"]
CATEGORIES = ["user", "item", "category"]
SEQUENCE = {
    "targets": ["item", "category"],
    "histories": ["item_history", "category_history"],
    "mask": "mask",
    "profile": ["user"],
}
NEGATIVES = ["neg_item_history", "neg_category_history"]
MODELS = {
    "ncf": lambda **o: NCF.from_schema(SCHEMA, factors=4, hidden=(16, 8), **o),
    "wide and deep": lambda **o: WideAndDeep.from_schema(
        SCHEMA, ["cross", "user"], CATEGORIES, NUMBERS, dim=4, hidden=(16,), dropout=0.0, **o
    ),
    "deepfm": lambda **o: DeepFM.from_schema(SCHEMA, CATEGORIES, NUMBERS, dim=4, hidden=(16,), **o),
    "deepfm without numbers": lambda **o: DeepFM.from_schema(
        SCHEMA, CATEGORIES, dim=4, hidden=(16,), **o
    ),
    "dlrm": lambda **o: DLRM.from_schema(
        SCHEMA, CATEGORIES, NUMBERS, dim=4, bottom=(8,), hidden=(16,), **o
    ),
    "dien": lambda **o: DIEN.from_schema(SCHEMA, **SEQUENCE, dim=4, hidden=(16,), **o),
    "mmoe": lambda **o: MMoE.from_schema(
        SCHEMA, CATEGORIES, NUMBERS, ["click", "like"], dim=4, expert_hidden=(16,), **o
    ),
    "two towers": lambda **o: TwoTower.from_schema(
        SCHEMA,
        ["user"],
        ["item", "category"],
        item_numbers=["price"],
        user_sequences=["item_history"],
        dim=8,
        hidden=(16,),
        **o,
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Limit PyTorch to one thread, which is faster for small matrices."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def columns(names, rows, seed=0):
    """Return columns as an Estimator passes them."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for name in names:
        feature = SCHEMA[name]
        shape = (rows, *feature.shape)
        if name == "mask":
            lengths = torch.randint(0, STEPS + 1, (rows, 1), generator=generator)
            made.append((torch.arange(STEPS) < lengths).to(torch.int32))
        elif feature.cardinality is None:
            made.append(torch.rand(shape, generator=generator))
        else:
            high = feature.cardinality
            made.append(torch.randint(0, high, shape, generator=generator, dtype=torch.int32))
    return made


def tensors(output):
    if isinstance(output, dict):
        return list(output.values())
    return list(output) if isinstance(output, tuple) else [output]


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return MODELS[request.param]()


def test_every_weight_gets_a_gradient(model):
    outputs = tensors(model(*columns(model.feature_cols, 64)))
    assert all(len(each) == 64 for each in outputs)
    # two vectors of length 1 have a constant square, so their product is taken
    loss = (
        (outputs[0] * outputs[-1]).sum() if isinstance(model, TwoTower) else sum(map(sum, outputs))
    )
    loss.backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert torch.isfinite(weight.grad).all(), name
        assert weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("fields", [1, 2, 5])
def test_products_of_pairs_and_their_gradients(fields):
    generator = torch.Generator().manual_seed(fields)
    first, others = torch.randn(3, 4, generator=generator), torch.randn(3, fields, 4)
    inputs = [each.double().requires_grad_() for each in (first, others)]
    interaction = DotInteraction(fields)
    found = interaction(*inputs)
    vectors = torch.cat([inputs[0][:, None], inputs[1]], 1)
    pairs = [(vectors[:, i] * vectors[:, j]).sum(1) for i in range(fields + 1) for j in range(i)]
    assert torch.allclose(found, torch.cat([inputs[0], torch.stack(pairs, 1)], 1))
    assert torch.autograd.gradcheck(interaction, inputs)
    with torch.no_grad():
        assert torch.equal(interaction(*inputs), found)


def test_a_model_learns_a_few_rows_by_heart(model):
    inputs = columns(model.feature_cols, 24, seed=1)
    label = torch.randint(0, 2, (24,), generator=torch.Generator().manual_seed(2)).float()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.04)
    item = inputs[model.feature_cols.index("item")]
    for _ in range(100):
        optimizer.zero_grad()
        output = model(*inputs)
        if isinstance(model, TwoTower):
            loss = InBatchSoftmax()(*output, item)
        else:
            loss = sum(nn.functional.binary_cross_entropy(each, label) for each in tensors(output))
        loss.backward()
        optimizer.step()
    assert loss < (1.0 if isinstance(model, TwoTower) else 0.15)


def test_a_model_is_exported_for_any_number_of_rows(model):
    model.eval()
    inputs = tuple(columns(model.feature_cols, 5))
    rows = torch.export.Dim("rows", min=2)
    shapes = tuple({0: rows} for _ in inputs)
    if isinstance(model, NCF):
        exported = torch.export.export(model, inputs, dynamic_shapes=shapes)
    else:
        exported = torch.export.export(model, inputs, dynamic_shapes=(shapes,))
    others = tuple(columns(model.feature_cols, 7, seed=3))
    for found, wanted in zip(
        tensors(exported.module()(*others)), tensors(model(*others)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_unknown_numbers_stand_for_0(model):
    model.eval()
    inputs = columns(model.feature_cols, 8)
    place = model.feature_cols.index("item")
    zeros, beyond, below = (list(inputs) for _ in range(3))
    zeros[place] = torch.zeros_like(inputs[place])
    beyond[place] = torch.full_like(inputs[place], 10**6)
    below[place] = torch.full_like(inputs[place], -1)
    for other in (beyond, below):
        for found, wanted in zip(tensors(model(*other)), tensors(model(*zeros)), strict=True):
            torch.testing.assert_close(found, wanted)


def test_padding_of_a_history_says_nothing():
    torch.manual_seed(0)
    model = MODELS["dien"]().eval()
    inputs = columns(model.feature_cols, 32)
    named = dict(zip(model.feature_cols, inputs, strict=True))
    padding = named["mask"] == 0
    for name in ("item_history", "category_history"):
        other = torch.randint(0, 4, named[name].shape, dtype=torch.int32)
        named[name] = torch.where(padding, other, named[name])
    torch.testing.assert_close(model(*named.values()), model(*inputs))
    interests = torch.randn(32, STEPS, 8)
    attention = model.attention(interests, torch.randn(32, 8), named["mask"])
    assert (attention[padding] == 0).all()
    lengths = named["mask"].sum(1)
    torch.testing.assert_close(attention.sum(1), (lengths > 0).float())
    assert (lengths == 0).any()
    assert torch.isfinite(model(*named.values())).all()


def test_attention_of_1_makes_a_gru_and_of_0_nothing():
    torch.manual_seed(0)
    layer, inputs = AUGRU(5), torch.randn(3, 4, 5)
    gru = nn.GRU(5, 5, batch_first=True)
    # the GRU of PyTorch has the update gate the other way round
    turn = torch.tensor([1.0] * 5 + [-1.0] * 5 + [1.0] * 5)
    with torch.no_grad():
        gru.weight_ih_l0.copy_(layer.of_input.weight * turn[:, None])
        gru.weight_hh_l0.copy_(layer.of_state.weight * turn[:, None])
        gru.bias_ih_l0.copy_(layer.of_input.bias * turn)
        gru.bias_hh_l0.copy_(layer.of_state.bias * turn)
    torch.testing.assert_close(layer(inputs, torch.ones(3, 4)), gru(inputs)[1][0])
    assert (layer(inputs, torch.zeros(3, 4)) == 0).all()


@pytest.mark.parametrize("nested", [True, False])
def test_interests_learn_from_negatives_while_training_only(nested):
    torch.manual_seed(0)
    model = DIEN.from_schema(SCHEMA, **SEQUENCE, negatives=NEGATIVES, dim=4, hidden=(16,))
    inputs = columns(model.feature_cols, 16)
    if not nested:
        inputs[-2:] = [each[:, :, 0] for each in inputs[-2:]]
    label = torch.ones(16)
    output, interests = model(*inputs)
    assert interests.shape == (16,)
    plain = nn.functional.binary_cross_entropy(output, label)
    loss = InterestLoss(0.5)(output, interests, label)
    torch.testing.assert_close(loss, plain + 0.5 * interests.mean())
    (gradient,) = torch.autograd.grad(interests.sum(), [model.interests.weight_ih_l0])
    assert gradient.abs().sum() > 0
    model.eval()
    evaluated = model(*inputs)
    torch.testing.assert_close(evaluated, model(*inputs[: len(model.predict_cols)]))
    torch.testing.assert_close(
        InterestLoss()(evaluated, label), nn.functional.binary_cross_entropy(evaluated, label)
    )


def test_every_task_has_its_own_mixture_of_experts():
    torch.manual_seed(0)
    model = MODELS["mmoe"]()
    inputs = columns(model.feature_cols, 10)
    shares = model.mixtures(*inputs)
    assert shares.shape == (10, 2, 4)
    torch.testing.assert_close(shares.sum(-1), torch.ones(10, 2))
    assert not torch.allclose(shares[:, 0], shares[:, 1])
    with torch.no_grad():  # a gate that trusts one expert makes the task that expert's
        model.gates[0].weight.zero_()
        model.gates[0].bias.copy_(torch.tensor([0.0, 50.0, 0.0, 0.0]))
    opinion = model.experts[1](model.input(inputs))
    wanted = torch.sigmoid(model.towers[0](opinion)).squeeze(1)
    torch.testing.assert_close(model(*inputs)["click"], wanted)


def test_losses_of_tasks_are_added_with_their_weights():
    outputs = {"a": torch.tensor([0.2, 0.9]), "b": torch.tensor([0.5, 0.5])}
    targets = torch.tensor([0, 1]), torch.tensor([[1.0], [0.0]])
    each = [
        nn.functional.binary_cross_entropy(output, target.reshape(2).float())
        for output, target in zip(outputs.values(), targets, strict=True)
    ]
    torch.testing.assert_close(MultiTaskLoss()(outputs, *targets), each[0] + each[1])
    torch.testing.assert_close(MultiTaskLoss([1, 3])(outputs, *targets), each[0] + 3 * each[1])
    with refused("model-output", "1", "label_cols"):
        MultiTaskLoss()(outputs, targets[0])


def test_the_same_item_in_another_row_is_no_negative():
    user = torch.nn.functional.normalize(torch.randn(3, 4), dim=1)
    item = torch.nn.functional.normalize(torch.randn(3, 4), dim=1)
    item[2] = item[0]
    numbers = torch.tensor([5, 2, 5])
    logits = user @ item.T / 0.5
    wanted = [
        torch.logsumexp(logits[0, :2], 0) - logits[0, 0],
        torch.logsumexp(logits[1], 0) - logits[1, 1],
        torch.logsumexp(logits[2, 1:], 0) - logits[2, 2],
    ]
    loss = InBatchSoftmax(0.5)
    torch.testing.assert_close(loss(user, item, numbers), torch.stack(wanted).mean())
    counts = [0, 1, 6, 1, 1, 2]
    biased = InBatchSoftmax(0.5, counts)
    share = torch.tensor(counts).clamp(min=1) / 12
    again = torch.logsumexp(logits[0, :2] - share[[5, 2]].log(), 0) - logits[0, 0] + share[5].log()
    assert biased(user, item, numbers) != loss(user, item, numbers)
    torch.testing.assert_close(
        biased(user[:2], item[:2], numbers[:2]) * 2 - again,
        torch.logsumexp(logits[1, :2] - share[[5, 2]].log(), 0) - logits[1, 1] + share[2].log(),
    )


def test_a_history_of_a_tower_is_the_mean_of_what_is_there():
    tower = Tower({"user": 5}, sequences={"item_history": 10}, dim=4)
    user, history = torch.tensor([1]), torch.tensor([[3, 4, 0, 0]])
    vectors = tower.input([user, history])[0, 4:]
    torch.testing.assert_close(vectors, tower.input.bags[0].table.weight[[3, 4]].mean(0))
    assert (tower.input([user, history * 0])[0, 4:] == 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NCF.from_schema(SCHEMA, item="city"), "city of type string has no embedding"),
        (lambda: NCF.from_schema(SCHEMA, item="no"), "The schema has no column 'no'"),
        (lambda: DeepFM.from_schema(SCHEMA, ["user"], ["city"]), "city should hold numbers"),
        (lambda: DeepFM({}), "categories has no columns"),
        (lambda: DLRM({"user": 3}, []), "numbers has no columns; DLRM needs both"),
        (lambda: WideAndDeep({}, {"user": 3}), "wide has no columns"),
        (lambda: Tower({}), "The model has no columns"),
        (lambda: MMoE({"user": 3}, tasks="click"), "tasks should be a list of names"),
        (lambda: InBatchSoftmax(0), "temperature should be a number above 0"),
        (
            lambda: DIEN.from_schema(SCHEMA, ["item"], ["ragged"], "mask"),
            "ragged should hold arrays of one length",
        ),
        (
            lambda: DIEN.from_schema(SCHEMA, ["item", "category"], ["item_history"], "mask"),
            "histories and negatives should have a column for each of targets",
        ),
        (
            lambda: MODELS["deepfm"]()(*columns(["user"], 2)),
            "DeepFM takes 5 columns ['user', 'item', 'category', 'price', 'age'], but got 1",
        ),
    ],
)
def test_what_does_not_fit_is_named(call, message):
    with pytest.raises(UsageError) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("name", MODELS)
def test_a_model_with_sharded_tables_is_the_same_model(name):
    """Test that plain and sharded models load each other's weights."""
    torch.manual_seed(0)
    sharded, ordinary = MODELS[name](sharded=True).eval(), MODELS[name]().eval()
    assert any(isinstance(each, ShardedEmbedding) for each in sharded.modules())
    ordinary.load_state_dict(sharded.state_dict())
    inputs = columns(ordinary.feature_cols, 5)
    for a, b in zip(tensors(sharded(*inputs)), tensors(ordinary(*inputs)), strict=True):
        assert torch.equal(a, b)
    model = sharded.train()
    sum(each.sum() for each in tensors(model(*inputs))).backward()
    tables = [each for each in model.modules() if isinstance(each, ShardedEmbedding)]
    assert all(table.weight.grad.is_sparse for table in tables)
