"""Programs that train by a TableLoader in the loop of a framework, and are killed within an epoch.

``python loader_programs.py FRAMEWORK FOLDER LOG [STEPS]`` reads ``FOLDER/table``, goes on from
the checkpoint in FOLDER if there is one, writes the rows and the loss of each step to LOG,
and kills itself after STEPS of them.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from bigdl.data import TableLoader

EPOCHS, BATCH, EVERY = 3, 32, 3


class Log:
    """A line for each step, with the ids of its rows and its loss."""

    def __init__(self, path, steps):
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._left = steps

    def write(self, rows, loss):
        print(json.dumps([rows.tolist(), float(loss)]), file=self._file, flush=True)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def loader_of(folder, **options):
    return TableLoader(str(folder / "table"), batch_size=BATCH, **options)


def parts():
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.Adam(model.parameters(), 0.1)


def loss_of(model, batch):
    return ((model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2).mean()


def plain(folder, log):
    loader = loader_of(folder)
    model, optimizer = parts()
    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    while loader.epoch < EPOCHS:
        for step, batch in enumerate(loader):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % EVERY == 0:
                states = {"model": model, "optimizer": optimizer, "loader": loader}
                torch.save({k: v.state_dict() for k, v in states.items()}, f"{checkpoint}.new")
                os.replace(f"{checkpoint}.new", checkpoint)
            log.write(batch["id"], loss)


def torchrun(folder, log):
    """Several ranks with DistributedDataParallel, saved by torch.distributed.checkpoint."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    dist.init_process_group("gloo")
    loader = loader_of(folder)
    model, optimizer = parts()
    ddp = torch.nn.parallel.DistributedDataParallel(model)
    pointer = folder / "checkpoint"
    if pointer.exists():
        states = dict(zip(("model", "optimizer"), get_state_dict(ddp, optimizer), strict=True))
        dcp.load({**states, "loader": loader}, checkpoint_id=pointer.read_text())
        set_state_dict(
            ddp, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )
    done = 0
    while loader.epoch < EPOCHS:
        for batch in loader:
            share = len(batch["id"]) * dist.get_world_size() / loader.global_rows
            loss = loss_of(ddp, batch) * share if len(batch["id"]) else loss_of_none(ddp)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done % EVERY == 0:
                states = dict(
                    zip(("model", "optimizer"), get_state_dict(ddp, optimizer), strict=True)
                )
                place = str(folder / f"dcp-{dist.get_world_size()}-{done}")
                dcp.save({**states, "loader": loader}, checkpoint_id=place)
                if dist.get_rank() == 0:
                    Path(f"{pointer}.new").write_text(place)
                    os.replace(f"{pointer}.new", pointer)
                dist.barrier()
            log.write(batch["id"], loss)
    dist.destroy_process_group()


def loss_of_none(model):
    return model(torch.zeros(1, 1)).sum() * 0


def lightning(folder, log):
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self._optimizer = parts()

        def configure_optimizers(self):
            return self._optimizer

        def training_step(self, batch, index):
            return {"loss": loss_of(self.model, batch), "id": batch["id"]}

    class Record(pl.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, index):
            log.write(outputs["id"], outputs["loss"])

    saver = pl.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=EVERY, save_top_k=-1
    )
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saver, Record()],
    )
    saved = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    trainer.fit(Module(), loader_of(folder), ckpt_path=saved[-1] if saved else None)


def fabric(folder, log):
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    loader = loader_of(folder)
    model, optimizer = fabric.setup(*parts())
    state = {"model": model, "optimizer": optimizer, "loader": loader}
    checkpoint = folder / "checkpoint"
    if checkpoint.exists():
        fabric.load(checkpoint, state)
    while loader.epoch < EPOCHS:
        for step, batch in enumerate(loader):
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            fabric.backward(loss)
            optimizer.step()
            if step % EVERY == 0:
                fabric.save(f"{checkpoint}.new", state)
                os.replace(f"{checkpoint}.new", checkpoint)
            log.write(batch["id"], loss)


def accelerate(folder, log):
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = loader_of(folder)
    model, optimizer = accelerator.prepare(*parts())
    accelerator.register_for_checkpointing(loader)
    pointer = folder / "checkpoint"
    if pointer.exists():
        accelerator.load_state(pointer.read_text())
    done = 0
    while loader.epoch < EPOCHS:
        for batch in loader:
            loss = loss_of(model, batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            done += 1
            if done % EVERY == 0:
                accelerator.save_state(str(folder / f"state-{done}"))
                Path(f"{pointer}.new").write_text(str(folder / f"state-{done}"))
                os.replace(f"{pointer}.new", pointer)
            log.write(batch["id"], loss)


def trainer(folder, log):
    """Hugging Face's Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from bigdl.data.hugging_face import TableLoaderCallback

    loader = loader_of(folder)
    model, optimizer = parts()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, id, x, y):
            self.seen = id, loss_of(self.inner, {"x": x, "y": y})
            return {"loss": self.seen[1]}

    class TableTrainer(Trainer):
        def get_train_dataloader(self):
            return loader

    class Record(TrainerCallback):
        def on_step_end(self, args, state, control, model, **kwargs):
            log.write(*model.seen)

    args = TrainingArguments(
        str(folder / "runs"),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=EVERY,
        ignore_data_skip=True,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        lr_scheduler_type="constant",
    )
    run = TableTrainer(
        Model(),
        args,
        optimizers=(optimizer, None),
        callbacks=[TableLoaderCallback(loader), Record()],
    )
    last = get_last_checkpoint(folder / "runs") if (folder / "runs").exists() else None
    run.train(resume_from_checkpoint=last)


def keras_(folder, log):
    import keras
    import numpy as np

    from bigdl.data.keras import LoaderBackup, TableDataset

    keras.utils.set_random_seed(0)
    data = TableDataset(loader_of(folder), "x", "y", weights="id")
    model = keras.Sequential([keras.Input(()), keras.layers.Reshape((1,)), keras.layers.Dense(1)])

    seen = []

    class Data(TableDataset):
        def __getitem__(self, index):
            x, y, rows = super().__getitem__(index)
            if self._is_in_epoch:
                seen.append(rows)
            return x, y

    class Record(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            seen.clear()

        def on_train_batch_end(self, batch, logs=None):
            if keras.backend.backend() == "jax":
                model.jax_state_sync()
            log.write(seen[batch], np.abs(model.get_weights()[0]).sum())

    data = Data(loader_of(folder), "x", "y", weights="id")
    model.compile("adam", "mse")
    backup = LoaderBackup(data, folder / "backup", save_freq=EVERY)
    model.fit(data, epochs=EPOCHS, verbose=0, callbacks=[backup, Record()])


def ray_loop(config):
    """The loop of one worker of Ray Train, which writes the rows and the loss of each step."""
    import tempfile

    import ray.train
    from ray.train.torch import prepare_model

    torch.set_num_threads(1)
    folder, steps = Path(config["folder"]), config["steps"]
    loader = loader_of(folder)
    model, optimizer = parts()
    model = prepare_model(model)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as saved_in:
            saved = torch.load(f"{saved_in}/state.pt")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
    rank = ray.train.get_context().get_world_rank()
    attempt = "before" if steps and not checkpoint else "after"
    log = Log(f"{config['log']}-{attempt}.{rank}", steps if attempt == "before" and rank else -1)
    done = 0
    while loader.epoch < EPOCHS:
        for batch in loader:
            share = len(batch["id"]) * 2 / loader.global_rows
            loss = loss_of(model, batch) * share if len(batch["id"]) else loss_of_none(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if done % EVERY == 0:
                with tempfile.TemporaryDirectory() as state:
                    states = {"model": model, "optimizer": optimizer, "loader": loader}
                    torch.save({k: v.state_dict() for k, v in states.items()}, f"{state}/state.pt")
                    ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(state))
            log.write(batch["id"], loss)


def ray_train(folder, log, steps):
    """Two workers of Ray Train, of which the second kills itself; Ray restarts the group."""
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    run = RunConfig(storage_path=str(folder / "runs"), failure_config=FailureConfig(max_failures=1))
    config = {"folder": str(folder), "log": log, "steps": steps}
    scaling = ScalingConfig(num_workers=2)
    TorchTrainer(ray_loop, train_loop_config=config, scaling_config=scaling, run_config=run).fit()
    ray.shutdown()


PROGRAMS = {
    "plain": plain,
    "torchrun": torchrun,
    "lightning": lightning,
    "fabric": fabric,
    "accelerate": accelerate,
    "trainer": trainer,
    "keras": keras_,
}

if __name__ == "__main__":
    framework, folder, log, *steps = sys.argv[1:]
    torch.set_num_threads(1)
    if framework == "ray":
        sys.path.insert(0, str(Path(__file__).parent))
        from loader_programs import ray_train as run_by_ray  # workers import it by its name

        run_by_ray(Path(folder), log, int(steps[0]) if steps else 0)
        raise SystemExit
    rank = os.environ.get("RANK", "0")
    PROGRAMS[framework](Path(folder), Log(f"{log}.{rank}", int(steps[0]) if steps else -1))
