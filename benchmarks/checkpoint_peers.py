"""The peers, each used as its own documentation shows. Nothing about measuring, nothing of ours.

What runs only with changes says so in its name (`stubbed`); what does not run without a GPU raises: that is its row.
"""

import importlib.metadata
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from checkpoint_methods import Method, Place, State


class TorchSave(Method):
    in_background = False

    def _path(self, step: int) -> Path:
        return self.place.folder / f"{step}.{self.place.rank}.pt"

    def save(self, step: int) -> None:
        with open(self._path(step), "wb") as file:
            torch.save(self.state.tensors(), file)
            file.flush()
            os.fsync(file.fileno())

    def restore(self, step: int) -> None:
        self.state.load(torch.load(self._path(step), weights_only=True))

    def forget(self, step: int) -> None:
        self._path(step).unlink(missing_ok=True)


class DcpSave(Method):
    """FileSystemWriter's own fsync is on by default."""

    in_background = False

    def _path(self, step: int) -> str:
        return str(self.place.folder / str(step))

    def save(self, step: int) -> None:
        dcp.save(self.state.tensors(), checkpoint_id=self._path(step))

    def restore(self, step: int) -> None:
        dcp.load(self.state.tensors(), checkpoint_id=self._path(step))

    def forget(self, step: int) -> None:
        if self.place.rank == 0:
            shutil.rmtree(self._path(step), ignore_errors=True)


class DcpThread(DcpSave):
    """With a stager that is kept, so that its buffers are; a group of its own, as training uses the default one."""

    in_background = True
    kind = AsyncCheckpointerType.THREAD

    def __init__(self, place: Place, state: State) -> None:
        super().__init__(place, state)
        self._future: Any = None
        self._stager: Any = None
        self._group: Any = None

    def open(self) -> None:
        # Pinned memory, asynchronous staging and non-blocking copies raise without a GPU.
        options = StagingOptions(
            use_pinned_memory=False, use_shared_memory=True, use_async_staging=False, use_non_blocking_copy=False
        )
        self._stager = DefaultStager(options)
        self._group = dist.new_group(backend="gloo")

    def save(self, step: int) -> None:
        self._future = dcp.async_save(
            self.state.tensors(),
            checkpoint_id=self._path(step),
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )

    def is_complete(self) -> bool:
        if not self._future.done():
            return False
        self._future.result()
        return True

    def close(self) -> None:
        self._stager.close()


class DcpProcess(DcpThread):
    kind = AsyncCheckpointerType.PROCESS


class DlroverMemory(Method):
    """Flash checkpoint into shared memory. Without `dlrover-run` its saver is a child of local rank 0."""

    in_background = False
    storage = False

    @classmethod
    def require(cls) -> None:
        import dlrover.trainer.torch.flash_checkpoint.ddp  # noqa: F401

    def version(self) -> str:
        return importlib.metadata.version("dlrover")

    def open(self) -> None:
        from dlrover.trainer.torch.flash_checkpoint.checkpointer import StorageType
        from dlrover.trainer.torch.flash_checkpoint.ddp import DdpCheckpointer

        self._kind = StorageType.DISK if self.storage else StorageType.MEMORY
        world = self.place.world
        self._checkpointer = DdpCheckpointer(
            str(self.place.folder), local_shard_num=world, global_shard_num=world, comm_backend="gloo"
        )
        self._step = 0

    def save(self, step: int) -> None:
        self._step = step
        self._checkpointer.save_checkpoint(step, self.state.tensors(), storage_type=self._kind)

    def restore(self, step: int) -> None:
        self.state.load(self._checkpointer.load_checkpoint())


class DlroverStorage(DlroverMemory):
    in_background = True
    storage = True

    def is_complete(self) -> bool:
        try:
            return int((self.place.folder / "dlrover_latest.txt").read_text() or 0) >= self._step
        except OSError:
            return False

    def forget(self, step: int) -> None:
        if self.place.rank == 0:
            shutil.rmtree(self.place.folder / str(step), ignore_errors=True)


class NvrxLocal(Method):
    """The local checkpoint manager, on a folder in memory. It demands tensors on a GPU."""

    in_background = False

    @classmethod
    def require(cls) -> None:
        import nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager  # noqa: F401

    def version(self) -> str:
        return importlib.metadata.version("nvidia-resiliency-ext")

    def open(self) -> None:
        from nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager import LocalCheckpointManager

        self._manager = LocalCheckpointManager(f"/dev/shm/nvrx-{os.environ['TORCHELASTIC_RUN_ID']}")

    def _wrap(self, tensors: dict[str, torch.Tensor]) -> Any:
        from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

        return BasicTensorAwareStateDict(tensors)

    def save(self, step: int) -> None:
        self._manager.save(self._wrap(self.state.tensors()), step, is_async=False)

    def restore(self, step: int) -> None:
        self._manager.find_latest()
        wrapped, _ = self._manager.load()
        self.state.load(wrapped.state_dict)


class NvrxLocalStubbed(NvrxLocal):
    """The same without its two demands for a GPU: a clone in place of the copy from the device, none back to it."""

    def _wrap(self, tensors: dict[str, torch.Tensor]) -> Any:
        return _stubbed()(tensors)


def _stubbed() -> Any:
    from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict

    class OnCpu(BasicTensorAwareStateDict):  # type: ignore[misc]
        def __init__(self, state_dict: dict[str, torch.Tensor]) -> None:
            self.state_dict = state_dict
            self._is_hollow = False

        def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
            self.state_dict = {name: tensor.clone() for name, tensor in self.state_dict.items()}

        def restore_tensor_device(self, non_blocking: bool = True) -> None:
            pass

    OnCpu.__qualname__ = "OnCpu"  # it is pickled by name
    globals()["OnCpu"] = OnCpu
    return OnCpu


class LmResiliency(Method):
    """In the trainer's own memory, replicated to the other rank where there is one. No checksum, as it comes."""

    @classmethod
    def require(cls) -> None:
        import lm_resiliency  # noqa: F401

    def version(self) -> str:
        return importlib.metadata.version("lm-resiliency")

    def open(self) -> None:
        from lm_resiliency import InMemoryCkptConfig
        from lm_resiliency.checkpointing.manager import InMemoryCheckpointManager

        config = InMemoryCkptConfig(
            interval=1,
            replication_jump=1,
            disk_flush_interval=0,
            disk_folder=str(self.place.folder),
            run_id=os.environ["TORCHELASTIC_RUN_ID"],
            pin_memory=False,
        )
        self._manager = InMemoryCheckpointManager(config)

    def save(self, step: int) -> None:
        self._manager.save(self.state.tensors(), step)

    def is_complete(self) -> bool:
        # It has no question that does not block: its threads are asked (0.2.0).
        thread = self._manager._completion_thread
        if thread is not None and thread.is_alive():
            return False
        if self._manager._replicator.in_flight:
            return False
        if not self._manager.finalize_replication():
            raise RuntimeError("the replica did not arrive")
        return True

    def restore(self, step: int) -> None:
        loaded = self._manager.load(step=None)
        if loaded is None:
            raise RuntimeError("load() found no checkpoint")
        self.state.load(loaded[0])
