import itertools
import pickle
import subprocess
import sys

import numpy as np
import pytest
from refusals import refused

torch = pytest.importorskip("torch")

from sklearn import metrics as sklearn_metrics  # noqa: E402

from bigdl.common.errors import UsageError  # noqa: E402
from bigdl.orca.learn.metrics import (  # noqa: E402
    AUC,
    MAE,
    MSE,
    ROC,
    Accuracy,
    BinaryAccuracy,
    BinaryCrossEntropy,
    CategoricalAccuracy,
    CategoricalCrossEntropy,
    CustomizedMetric,
    F1Score,
    KLDivergence,
    Metric,
    Poisson,
    Precision,
    PrecisionRecallCurve,
    Recall,
    SparseCategoricalAccuracy,
    SparseCategoricalCrossEntropy,
    Top5Accuracy,
    TorchMetric,
    merge_states,
)
from bigdl.testing.metrics import MetricContract  # noqa: E402

ROWS = 97


def softmax(generator, rows, classes):
    return torch.softmax(3 * torch.randn(rows, classes, generator=generator), -1)


def binary_columns(generator, rows):
    # few distinct scores, so that there are ties
    return torch.randint(0, 20, (rows,), generator=generator) / 20.0


def labels(generator, rows, classes):
    return torch.randint(0, classes, (rows,), generator=generator)


def one_hot(generator, rows, classes):
    return torch.nn.functional.one_hot(labels(generator, rows, classes), classes)


def binary_case(g, rows):
    return binary_columns(g, rows), labels(g, rows, 2)


def class_case(g, rows):
    return softmax(g, rows, 7), labels(g, rows, 7)


def regression_case(g, rows):
    return torch.rand(rows, 3, generator=g), torch.rand(rows, 3, generator=g)


def entropy(p, t):
    return -np.log(np.clip(p[np.arange(len(t)), t], 1e-7, None)).mean()


# metric, inputs of n rows, figure by numpy or sklearn
CASES = {
    "accuracy of classes": (
        Accuracy(),
        class_case,
        lambda p, t: sklearn_metrics.accuracy_score(t, p.argmax(1)),
    ),
    "accuracy of probabilities": (
        Accuracy(),
        binary_case,
        lambda p, t: sklearn_metrics.accuracy_score(t, p >= 0.5),
    ),
    "accuracy of labels": (
        Accuracy(),
        lambda g, n: (labels(g, n, 4), labels(g, n, 4)),
        lambda p, t: sklearn_metrics.accuracy_score(t, p),
    ),
    "accuracy of labels that start at 1": (
        Accuracy(zero_based_label=False),
        lambda g, n: (softmax(g, n, 7), labels(g, n, 7) + 1),
        lambda p, t: sklearn_metrics.accuracy_score(t - 1, p.argmax(1)),
    ),
    "sparse categorical accuracy": (
        SparseCategoricalAccuracy(),
        lambda g, n: (softmax(g, n, 7), labels(g, n, 7)[:, None].float()),
        lambda p, t: sklearn_metrics.accuracy_score(t, p.argmax(1)),
    ),
    "categorical accuracy": (
        CategoricalAccuracy(),
        lambda g, n: (softmax(g, n, 3), one_hot(g, n, 3)),
        lambda p, t: sklearn_metrics.accuracy_score(t.argmax(1), p.argmax(1)),
    ),
    "binary accuracy": (
        BinaryAccuracy(),
        lambda g, n: (binary_columns(g, n)[:, None], labels(g, n, 2)),
        lambda p, t: sklearn_metrics.accuracy_score(t, p.ravel() > 0.5),
    ),
    "binary accuracy of several outputs": (
        BinaryAccuracy(),
        lambda g, n: (torch.rand(n, 4, generator=g), torch.randint(0, 2, (n, 4), generator=g)),
        lambda p, t: ((p > 0.5) == t).mean(),
    ),
    "top 5 accuracy": (
        Top5Accuracy(),
        class_case,
        lambda p, t: sklearn_metrics.top_k_accuracy_score(t, p, k=5, labels=range(7)),
    ),
    "mean squared error": (
        MSE(),
        regression_case,
        lambda p, t: sklearn_metrics.mean_squared_error(t, p),
    ),
    "mean absolute error": (
        MAE(),
        regression_case,
        lambda p, t: sklearn_metrics.mean_absolute_error(t, p),
    ),
    "binary cross-entropy": (
        BinaryCrossEntropy(),
        lambda g, n: (binary_columns(g, n), labels(g, n, 2)),
        lambda p, t: sklearn_metrics.log_loss(t, np.clip(p.astype(float), 1e-7, 1 - 1e-7)),
    ),
    "categorical cross-entropy": (
        CategoricalCrossEntropy(),
        lambda g, n: (softmax(g, n, 5), one_hot(g, n, 5)),
        lambda p, t: entropy(p, t.argmax(1)),
    ),
    "sparse categorical cross-entropy": (SparseCategoricalCrossEntropy(), class_case, entropy),
    "Kullback-Leibler divergence": (
        KLDivergence(),
        lambda g, n: (softmax(g, n, 5), softmax(g, n, 5)),
        lambda p, t: (t * np.log(t / p + 1e-7)).sum(1).mean(),
    ),
    "Poisson": (
        Poisson(),
        regression_case,
        lambda p, t: (p - t * np.log(p + 1e-7)).mean(),
    ),
    "area under the ROC curve": (
        AUC(),
        binary_case,
        lambda p, t: sklearn_metrics.roc_auc_score(t, p),
    ),
    "area from two columns": (
        AUC(),
        lambda g, n: (softmax(g, n, 2).double(), labels(g, n, 2)[:, None]),
        lambda p, t: sklearn_metrics.roc_auc_score(t.ravel(), p[:, 1]),
    ),
    "precision of probabilities": (
        Precision(),
        binary_case,
        lambda p, t: sklearn_metrics.precision_score(t, p >= 0.5),
    ),
    "recall of two columns": (
        Recall(),
        lambda g, n: (softmax(g, n, 2), labels(g, n, 2)),
        lambda p, t: sklearn_metrics.recall_score(t, p.argmax(1)),
    ),
    "F1 at another threshold": (
        F1Score(threshold=0.7),
        binary_case,
        lambda p, t: sklearn_metrics.f1_score(t, p >= np.float32(0.7)),
    ),
    "F1 of both of two classes": (
        F1Score(average="macro"),
        binary_case,
        lambda p, t: sklearn_metrics.f1_score(t, p >= 0.5, average="macro"),
    ),
    "F1 of labels": (
        F1Score(num_classes=5, average="macro"),
        lambda g, n: (labels(g, n, 4), labels(g, n, 4)),
        lambda p, t: sklearn_metrics.f1_score(t, p, average="macro"),
    ),
    **{
        f"{metric.__name__} of classes, {average}": (
            metric(average=average),
            class_case,
            lambda p, t, f=figure, a=average: f(t, p.argmax(1), average=a, zero_division=0),
        )
        for metric, figure in [
            (Precision, sklearn_metrics.precision_score),
            (Recall, sklearn_metrics.recall_score),
            (F1Score, sklearn_metrics.f1_score),
        ]
        for average in ("micro", "macro", "weighted")
    },
    "a function": (
        CustomizedMetric(torch.nn.functional.mse_loss),
        regression_case,
        lambda p, t: sklearn_metrics.mean_squared_error(t, p),
    ),
}


def random_cuts(seed, rows, parts):
    """Bounds of `parts` consecutive ranges of rows, of which some may be empty."""
    cuts = np.random.default_rng(seed).integers(0, rows + 1, parts - 1)
    return [0, *sorted(int(cut) for cut in cuts), rows]


def split_state(metric, preds, targets, seed, parts, batch=11):
    """The merged state of `parts` workers, each with its own range of rows in batches."""
    bounds = random_cuts(seed, len(preds), parts)
    states = []
    for start, stop in itertools.pairwise(bounds):
        worker = metric.get_metric("pytorch")
        for first in range(start, stop, batch):
            last = min(first + batch, stop)
            worker(preds[first:last], targets[first:last])
        states.append(worker.state())
    return merge_states(states, metric.get_metric().reductions)


class TestNamedMetrics(MetricContract):
    @pytest.fixture(params=CASES, autouse=True)
    def _case(self, request):
        self.metric, self.draw, self.expected = CASES[request.param]
        # a user's function computes its batch mean in float32
        self.tolerance = 1e-6 if request.param == "a function" else 1e-12

    def inputs(self, generator, rows):
        return self.draw(generator, rows)


class TestMetricOfTorchmetrics(MetricContract):
    has_plain_states = False
    tolerance = 1e-5

    @pytest.fixture(autouse=True)
    def _case(self, torchmetrics):
        self.metric = torchmetrics.MeanSquaredError()

    def inputs(self, generator, rows):
        return regression_case(generator, rows)


@pytest.mark.parametrize("metric", [ROC(), PrecisionRecallCurve()])
def test_curves_of_weighted_rows_are_those_of_repeated_rows(metric):
    preds, targets = binary_case(torch.Generator().manual_seed(1), ROWS)
    times = torch.arange(ROWS) % 3
    repeated, weighted = metric.get_metric(), metric.get_metric()
    repeated(preds.repeat_interleave(times), targets.repeat_interleave(times))
    weighted(preds, targets, times)
    for found, expected in zip(weighted.compute(), repeated.compute(), strict=True):
        torch.testing.assert_close(found, expected)


def test_weights_of_several_outputs_are_those_of_their_row():
    worker = MSE().get_metric()
    worker(torch.zeros(2, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([3.0, 1.0]))
    assert worker.compute().item() == pytest.approx((3 * 5 + 25) / 8)


def test_rows_without_any_weight_have_no_figure():
    for metric in (MSE(), Precision(), AUC()):
        worker = metric.get_metric()
        worker(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]), torch.zeros(2))
        assert worker.compute().isnan()


@pytest.mark.parametrize(
    ("metric", "weights", "message"),
    [
        (Accuracy(), [1.0], ("data-shape", "2")),
        (MSE(), [1.0, -1.0], ("data-value", "0")),
        (AUC(), [1.0, float("nan")], ("data-value", "0")),
        (CustomizedMetric(max), [1.0, 1.0], ("metric-unsupported",)),
    ],
)
def test_wrong_weights_are_refused(metric, weights, message):
    with refused(*message):
        metric.get_metric()(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]), torch.tensor(weights))


def figure_of(metric, *batches):
    state = metric.get_metric()
    for preds, targets in batches:
        state(torch.as_tensor(preds), torch.as_tensor(targets))
    return state.compute()


def test_values_worked_out_by_hand():
    assert figure_of(Accuracy(), ([0, 2, 3, 4], [1, 2, 3, 4])) == 0.75
    assert figure_of(BinaryAccuracy(), ([0.98, 1, 0, 0.6], [1, 1, 0, 0])) == 0.75
    poisson = figure_of(Poisson(), ([[1.0, 1.0], [0.0, 0.0]], [[0.0, 1.0], [0.0, 0.0]]))
    assert poisson.item() == pytest.approx(0.49999997, abs=1e-8)


def test_one_column_meets_a_flat_vector():
    column, flat = [[0.9], [0.2], [0.4]], [1, 0, 1]
    for metric in (Accuracy(), BinaryAccuracy(), MSE(), BinaryCrossEntropy(), AUC(), Recall()):
        expected = figure_of(metric, (np.ravel(column), flat))
        assert figure_of(metric, (column, flat)) == expected
        assert figure_of(metric, (column, np.reshape(flat, (3, 1)))) == expected
        assert figure_of(metric, (np.ravel(column), np.reshape(flat, (3, 1)))) == expected


def test_a_single_row_may_come_without_dimension():
    assert figure_of(MSE(), (3.0, [1.0]), ([1.0], 1.0)) == 2.0


def test_accuracy_of_sequences_counts_every_step():
    preds, targets = torch.eye(3)[torch.tensor([[0, 1], [2, 2]])], [[0, 1], [2, 0]]
    assert figure_of(Accuracy(), (preds, targets)) == 0.75
    assert figure_of(SparseCategoricalAccuracy(), (preds, targets)) == 0.75
    # sequences of one step only
    assert figure_of(Accuracy(), (preds[:, :1], [[0], [2]])) == 1


def test_accuracy_takes_the_threshold_itself_as_positive_and_binary_accuracy_does_not():
    assert figure_of(Accuracy(), ([0.5], [1])) == 1
    assert figure_of(BinaryAccuracy(), ([0.5], [1])) == 0


def test_numpy_arrays_are_fine():
    state = MAE().get_metric()
    state(np.array([1.0, 2.0]), np.array([1, 4]))
    assert state.compute() == 1


def test_top5_needs_no_five_classes_and_breaks_ties_by_class():
    assert figure_of(Top5Accuracy(), ([[0.1, 0.9]], [0])) == 1
    ties = torch.zeros(7, 7)
    assert figure_of(Top5Accuracy(), (ties, torch.arange(7))) == pytest.approx(5 / 7)
    assert figure_of(Top5Accuracy(), (torch.full((1, 7), torch.nan), [0])) == 0


def test_impossible_predictions_cost_a_finite_amount():
    limit = -np.log(1e-7)
    assert figure_of(BinaryCrossEntropy(), ([0.0, 1.0], [1, 0])) == pytest.approx(limit)
    assert figure_of(CategoricalCrossEntropy(), ([[0.0, 1.0]], [[1, 0]])) == pytest.approx(limit)
    assert figure_of(SparseCategoricalCrossEntropy(), ([[0.0, 1.0]], [0])) == pytest.approx(limit)
    divergence = figure_of(KLDivergence(), ([[0.0, 1.0, 0.0]], [[1.0, 0.0, 0.0]]))
    assert divergence == pytest.approx(limit)


@pytest.mark.parametrize("metric", [MSE(), MAE(), BinaryCrossEntropy(), Poisson()])
def test_unequal_shapes_are_refused(metric):
    with pytest.raises(UsageError, match=r"preds and targets must have the same shape.*3, 2.*3,"):
        figure_of(metric, (torch.zeros(3, 2), torch.zeros(3)))


@pytest.mark.parametrize(
    ("metric", "preds", "targets", "message"),
    [
        (Accuracy(), torch.zeros(2, 5, 3), torch.zeros(2, 3), ("data-shape",)),
        (SparseCategoricalAccuracy(), torch.zeros(3), torch.zeros(3), ("data-shape",)),
        (CategoricalAccuracy(), torch.zeros(3, 2), torch.zeros(3), ("data-shape",)),
        (Top5Accuracy(), torch.zeros(1, 3), torch.tensor([3]), ("data-value", "0", "2", "3")),
        (AUC(), torch.zeros(2, 3), torch.tensor([0, 1]), ("data-shape",)),
        (AUC(), torch.zeros(2), torch.tensor([1, 2]), ("data-value", "0", "1", "2")),
        (AUC(), torch.zeros(2, 2), torch.zeros(2, 2), ("data-shape",)),
        (Precision(), torch.zeros(2, 4), torch.zeros(2, 4), ("data-shape",)),
        (Precision(), torch.tensor([0, 2]), torch.tensor([0, 1]), ("data-value", "0", "1", "2")),
        (Precision(num_classes=3), torch.zeros(2, 4), torch.zeros(2), ("data-shape", "4")),
        (Precision(num_classes=3), torch.zeros(2), torch.zeros(2), ("data-shape", "3")),
        (Recall(), torch.zeros(2), torch.tensor([0.0, torch.nan]), ("data-value",)),
        (MSE(), [torch.zeros(2), torch.zeros(2)], torch.zeros(2), ("data-type",)),
        (MSE(), [0.0], [0.0], ("data-type",)),
    ],
)
def test_inputs_that_do_not_fit_are_named(metric, preds, targets, message):
    with refused(*message):
        metric.get_metric()(preds, targets)


def test_batches_with_different_numbers_of_classes_are_refused():
    with refused("data-shape"):
        figure_of(Recall(), (torch.zeros(2, 3), [0, 1]), (torch.zeros(2, 4), [0, 1]))


@pytest.mark.parametrize(
    "wrong", [{"average": "samples"}, {"num_classes": 0}, {"num_classes": 2.0}]
)
def test_wrong_parameters_of_precision_are_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Precision(**wrong)


def test_precision_is_zero_when_nothing_was_predicted():
    assert figure_of(Precision(), ([0.1, 0.2], [1, 0])) == 0
    assert figure_of(F1Score(), ([0.1, 0.2], [0, 0])) == 0


def test_auc_is_nan_for_one_class_or_a_nan_score():
    assert figure_of(AUC(), ([0.1, 0.9], [1, 1])).isnan()
    assert figure_of(AUC(), ([0.1, torch.nan], [1, 0])).isnan()


def test_auc_does_not_lose_digits_on_many_rows():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(200_000, generator=generator, dtype=torch.float64)
    targets = (scores + torch.randn(200_000, generator=generator) > 0).long()
    expected = sklearn_metrics.roc_auc_score(targets, scores)
    assert figure_of(AUC(threshold_num=10), (scores, targets)).item() == pytest.approx(
        expected, rel=1e-7
    )


@pytest.mark.parametrize(
    ("metric", "oracle"),
    [
        (ROC(), lambda t, p: sklearn_metrics.roc_curve(t, p, drop_intermediate=False)),
        (PrecisionRecallCurve(), sklearn_metrics.precision_recall_curve),
    ],
)
def test_curves_equal_those_of_sklearn_for_any_split(metric, oracle):
    for seed in range(5):
        preds, targets = binary_case(torch.Generator().manual_seed(seed), ROWS)
        state = metric.get_metric()
        state.load_state(split_state(metric, preds, targets, seed, parts=seed + 1))
        for curve, expected in zip(
            state.compute(), oracle(targets.numpy(), preds.numpy()), strict=True
        ):
            np.testing.assert_allclose(curve.numpy(), expected, rtol=1e-6)


@pytest.mark.parametrize("metric", [ROC(), PrecisionRecallCurve()])
def test_curves_of_no_rows_do_not_fail(metric):
    assert len(metric.get_metric().compute()) == 3


def rows_weighted(preds, targets):
    return (preds - targets).mean()


def test_a_function_is_weighted_by_rows_and_sees_the_batch_as_it_is():
    seen = []

    def fn(preds, targets):
        seen.append(preds)
        return preds["x"].mean()

    state = CustomizedMetric(fn).get_metric()
    batch = {"x": torch.tensor([1.0, 3.0])}
    state(batch, torch.zeros(2))
    state({"x": torch.tensor([5.0])}, torch.zeros(1))
    state({"x": torch.tensor([])}, torch.zeros(0))
    assert state.compute() == 3
    assert seen[0] is batch
    assert len(seen) == 2


def test_a_function_that_returns_no_number_is_refused():
    with pytest.raises(UsageError, match=r"CustomizedMetric .* one number"):
        CustomizedMetric(lambda p, t: p).get_metric()(torch.zeros(2), torch.zeros(2))
    with refused("argument-type"):
        CustomizedMetric("mse")


def test_names_are_those_of_the_class_or_the_function():
    names = [CustomizedMetric(rows_weighted), CustomizedMetric(lambda p, t: 0), AUC()]
    assert [metric.get_name() for metric in names] == ["rows_weighted", "CustomizedMetric", "AUC"]
    assert CustomizedMetric(rows_weighted, name="bias").get_name() == "bias"


def test_conversion_keeps_order_and_accepts_every_form():
    given = [Accuracy(), "MSE", "binary_crossentropy", "top5accuracy", rows_weighted, "f1"]
    converted = Metric.convert_metrics_dict(given, "pytorch")
    assert list(converted) == [
        "Accuracy",
        "MSE",
        "BinaryCrossEntropy",
        "Top5Accuracy",
        "rows_weighted",
        "F1Score",
    ]
    for name, metric in converted.items():
        assert isinstance(metric, TorchMetric)
        assert metric.name == name
    assert [metric.name for metric in Metric.convert_metrics_list(given)] == list(converted)


def test_one_metric_needs_no_list_and_none_is_none():
    assert list(Metric.convert_metrics_dict("accuracy")) == ["Accuracy"]
    assert Metric.convert_metrics_list(None) == []
    assert Metric.convert_metrics_dict([]) == {}


def test_equal_names_are_numbered_ignoring_case():
    def mse(preds, targets):
        return 0

    given = [Precision(), MSE(), Precision(average="macro"), mse]
    assert list(Metric.convert_metrics_dict(given)) == ["Precision", "MSE", "Precision_2", "mse_2"]


def test_an_object_that_follows_the_contract_is_copied_empty():
    fed = MSE().get_metric()
    fed(torch.ones(2), torch.zeros(2))
    (converted,) = Metric.convert_metrics_list([fed])
    assert converted is not fed
    assert converted.compute().isnan()
    assert fed.compute() == 1


class HasCompute:
    def __call__(self, preds, targets):
        pass

    def compute(self):
        return 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("acuracy", ("name-unknown", "'acuracy'", "BinaryAccuracy")),
        (3, ("argument-type", "3")),
        (Accuracy, ("argument-type",)),
        (HasCompute(), ("metric-unsupported", "HasCompute")),
    ],
)
def test_what_is_no_metric_is_refused_with_what_is(wrong, message):
    with refused(*message):
        Metric.convert_metrics_list([MSE(), wrong], "pytorch")


def test_other_backends_are_refused():
    with refused("unsupported"):
        MSE().get_metric("mxnet")


def test_states_of_different_metrics_do_not_merge():
    with refused("data-structure"):
        MSE().get_metric().merge(AUC().get_metric().state())
    with refused("data-empty"):
        merge_states([], {})


def test_merging_joins_in_rank_order_and_leaves_out_workers_without_rows():
    states = [
        {"x": torch.tensor([3]), "top": torch.tensor(1)},
        {"x": torch.tensor([]), "top": torch.tensor([])},
        {"x": torch.tensor([1, 2]), "top": torch.tensor(5)},
    ]
    merged = merge_states(states, {"x": "cat", "top": "max"})
    assert merged["x"].tolist() == [3, 1, 2]
    assert merged["x"].dtype == torch.int64
    assert merged["top"] == 5


def test_importing_the_metrics_does_not_import_torch():
    code = "import sys, bigdl.orca.learn.metrics; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def torchmetrics():
    return pytest.importorskip("torchmetrics")


class TestTorchmetrics:
    @staticmethod
    def check(metric, preds, targets):
        """Feed in one pass and split over workers, one of them empty; return the figure."""
        whole = metric.clone()
        whole.update(preds, targets)
        expected = whole.compute()
        for parts in (2, 4):
            (union,) = Metric.convert_metrics_list([metric])
            states = [union.state()]
            for rows in torch.arange(len(preds)).chunk(parts):
                (worker,) = Metric.convert_metrics_list([metric])
                for batch in rows.split(10):
                    worker(preds[batch], targets[batch])
                states.append(worker.state())
            union.load_state(merge_states(states, union.reductions))
            torch.testing.assert_close(union.compute(), expected, rtol=1e-5, atol=1e-6)
        return expected

    def test_the_figure_is_that_of_one_pass(self, torchmetrics):
        generator = torch.Generator().manual_seed(0)
        binary, classes = binary_case(generator, ROWS), class_case(generator, ROWS)
        regression = regression_case(generator, ROWS)
        for metric, inputs in [
            (torchmetrics.Accuracy(task="multiclass", num_classes=7), classes),
            (torchmetrics.F1Score(task="multiclass", num_classes=7, average=None), classes),
            (torchmetrics.AUROC(task="binary"), binary),
            (torchmetrics.AUROC(task="multiclass", num_classes=7), classes),  # a 2-D list state
            (torchmetrics.MeanSquaredError(), regression),
            (torchmetrics.ExplainedVariance(), regression),  # a state that takes the batch's shape
            (torchmetrics.SpearmanCorrCoef(num_outputs=3), regression),
            (torchmetrics.MeanSquaredError() + 2 * torchmetrics.MeanAbsoluteError(), regression),
        ]:
            self.check(metric, *inputs)

    def test_our_figures_equal_theirs(self, torchmetrics):
        generator = torch.Generator().manual_seed(1)
        preds, targets = class_case(generator, ROWS)
        task = {"task": "multiclass", "num_classes": 7}
        for ours, theirs in [
            (Accuracy(), torchmetrics.Accuracy(**task, average="micro")),
            (Top5Accuracy(), torchmetrics.Accuracy(**task, average="micro", top_k=5)),
            (Precision(average="macro"), torchmetrics.Precision(**task, average="macro")),
            (Recall(average="weighted"), torchmetrics.Recall(**task, average="weighted")),
            (F1Score(), torchmetrics.F1Score(**task, average="micro")),
        ]:
            torch.testing.assert_close(
                figure_of(ours, (preds, targets)), theirs(preds, targets), rtol=1e-6, atol=0
            )

    def test_the_object_of_the_user_is_left_alone(self, torchmetrics):
        metric = torchmetrics.MeanSquaredError()
        metric.update(torch.ones(2), torch.zeros(2))
        converted = Metric.convert_metrics_dict([metric])
        assert list(converted) == ["MeanSquaredError"]
        state = converted["MeanSquaredError"]
        assert state.compute().isnan()
        state(torch.full((2,), 3.0), torch.zeros(2))
        assert state.compute() == 9
        assert metric.compute() == 1

    def test_a_pickled_state_goes_on(self, torchmetrics):
        (state,) = Metric.convert_metrics_list([torchmetrics.AUROC(task="binary")])
        state(torch.tensor([0.1, 0.9]), torch.tensor([0, 1]))
        state = pickle.loads(pickle.dumps(state))
        state(torch.tensor([0.8, 0.2]), torch.tensor([0, 1]))
        assert state.compute() == 0.75

    def test_computing_starts_no_collective(self, torchmetrics):
        import torch.distributed as dist

        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            (state,) = Metric.convert_metrics_list(
                [torchmetrics.MeanSquaredError(dist_sync_fn=lambda *_, **__: 1 / 0)]
            )
            state(torch.ones(2), torch.zeros(2))
            assert state.compute() == 1
        finally:
            dist.destroy_process_group()

    def test_states_without_an_exact_merge_are_refused(self, torchmetrics):
        for metric in (
            torchmetrics.PearsonCorrCoef(),
            torchmetrics.MinMaxMetric(torchmetrics.MeanSquaredError()),
        ):
            with pytest.raises(UsageError, match=type(metric).__name__):
                Metric.convert_metrics_list([metric])
