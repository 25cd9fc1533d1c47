"""PLE: likes and retweets in one model, with task-specific and shared experts.

    python examples/friesian/train_ple.py

Tang et al., "Progressive Layered Extraction (PLE): A Novel Multi-Task Learning (MTL) Model for
Personalized Recommendations", RecSys 2020.
"""

import engagements
import programs
import synthetic
import torch
from torch import nn

from bigdl.friesian.models import MultiTaskLoss
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.pytorch import Estimator


class Extraction(nn.Module):
    """PLE layer with a mixture of experts for each task and a shared one.

    The mixture of a task has its own experts and the shared ones; that of what is shared has all.
    """

    def __init__(self, width, out, tasks, task_experts, shared):
        super().__init__()

        def experts(count):
            return nn.ModuleList(
                nn.Sequential(nn.Linear(width, out), nn.ReLU()) for _ in range(count)
            )

        self.own = nn.ModuleList(experts(task_experts) for _ in range(tasks))
        self.shared = experts(shared)
        self.gates = nn.ModuleList(nn.Linear(width, task_experts + shared) for _ in range(tasks))
        self.gate_of_all = nn.Linear(width, tasks * task_experts + shared)

    def forward(self, inputs, common):
        """Return the new task states and the new shared state from those of the previous layer."""
        shared = [expert(common) for expert in self.shared]
        task_outputs = [
            [expert(state) for expert in experts]
            for experts, state in zip(self.own, inputs, strict=True)
        ]
        mixed = [
            mixture(gate(state), experts + shared)
            for gate, state, experts in zip(self.gates, inputs, task_outputs, strict=True)
        ]
        everyone = [each for opinions in task_outputs for each in opinions] + shared
        return mixed, mixture(self.gate_of_all(common), everyone)


def mixture(logits, experts):
    """Return the mean of the experts, weighted by the softmax of the gate's logits."""
    return torch.einsum("ne,new->nw", logits.softmax(1), torch.stack(experts, 1))


class PLE(nn.Module):
    """Multi-task model that returns a dict of probabilities for numeric and categorical columns."""

    def __init__(
        self, schema, categories, numbers, tasks, dim=8, layers=(64, 32), task_experts=2, shared=2
    ):
        super().__init__()
        self.feature_cols, self.tasks = [*categories, *numbers], tasks
        self.tables = nn.ModuleList(
            nn.Embedding(schema.cardinality(name), dim) for name in categories
        )
        for table in self.tables:
            nn.init.normal_(table.weight, std=0.05)
        widths = [len(categories) * dim + len(numbers), *layers]
        self.layers = nn.ModuleList(
            Extraction(width, out, len(tasks), task_experts, shared)
            for width, out in zip(widths, layers, strict=False)
        )
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(widths[-1], 16), nn.ReLU(), nn.Linear(16, 1)) for _ in tasks
        )

    def forward(self, *columns):
        categories, numbers = columns[: len(self.tables)], columns[len(self.tables) :]
        parts = [
            table(column.long()) for table, column in zip(self.tables, categories, strict=True)
        ]
        common = torch.cat([*parts, *(each.float().unsqueeze(1) for each in numbers)], 1)
        states = [common] * len(self.tasks)
        for layer in self.layers:
            states, common = layer(states, common)
        return {
            task: torch.sigmoid(tower(state)).squeeze(1)
            for task, tower, state in zip(self.tasks, self.towers, states, strict=True)
        }


def main(argv=None):
    options = programs.parse(argv, __doc__, size={"rows": 20000}, epochs=5, lr=0.003)
    programs.start(options)
    train, test, chance = engagements.prepare(options)

    tasks = [f"{label}_probability" for label in engagements.LABELS]
    model = PLE(train.feature_schema(), engagements.CATEGORIES, engagements.NUMBERS, tasks)
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05),
        loss=MultiTaskLoss(),
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "batch_size": options.batch_size}
    est.fit(
        train.df, epochs=options.epochs, label_cols=engagements.LABELS, seed=options.seed, **columns
    )
    predicted = est.predict(test.df, **columns)
    metrics = engagements.metrics_of(predicted, tasks, chance)

    # the mean of the author
    _, codes = train.target_encode("author", engagements.LABELS, kfold=1)
    coded = test.encode_target(codes, drop_cat=False).to_pandas()
    for label in engagements.LABELS:
        auc = synthetic.auc(coded[label], coded[f"author_te_{label}"])
        metrics[f"{label} auc of the author's mean"] = float(auc)
    return programs.report(metrics)


if __name__ == "__main__":
    main()
    stop_orca_context()
