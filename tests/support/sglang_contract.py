"""What `kernels/engines/sglang_backend.py` relies on of sglang 0.5.15 to 0.5.23, as modules that stand in where sglang is not at hand.

Names and signatures only.  sglang itself needs a GPU and gigabytes to be imported; but its base class is one file of Python, so
where the environment names folders with unpacked sources (``TILECAST_SGLANG=folder:folder``, each with a ``sglang`` in it: a wheel is a
zip file), the same tests also run on the real base class, and other files are held against what is relied on by reading them.
"""

from __future__ import annotations

import ast
import enum
import os
import types
from pathlib import Path
from typing import Any

MODULES = ("sglang", "sglang.srt", "sglang.srt.layers", "sglang.srt.layers.attention", "sglang.srt.layers.attention.base_attn_backend",
           "sglang.srt.layers.attention.attention_registry", "sglang.srt.server_args")  # fmt: skip
#: What the real base class imports, beside torch: only names that it needs to be defined.
_IMPORTED = {
    "sglang.kernels": {}, "sglang.kernels.kernel_api_logging": {"debug_kernel_api": lambda f: f},
    "sglang.kernel_api_logging": {"debug_kernel_api": lambda f: f},
    "sglang.srt.environ": {"envs": types.SimpleNamespace()}, "sglang.srt.utils": {}, "sglang.srt.utils.common": {"is_npu": lambda: False},
    "sglang.srt.model_executor": {}, "sglang.srt.model_executor.forward_batch_info": {},
}  # fmt: skip


class ForwardMode(enum.IntEnum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY, DLLM_EXTEND = range(6)

    def is_idle(self):
        return self == ForwardMode.IDLE

    def is_decode(self):
        return self == ForwardMode.DECODE

    def is_mixed(self):
        return self == ForwardMode.MIXED

    def is_extend(self):
        return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY, ForwardMode.DLLM_EXTEND)

    def is_dllm_extend(self):
        return self == ForwardMode.DLLM_EXTEND


class AttentionBackend:
    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        pass

    def init_forward_metadata_in_graph(self, forward_batch):
        pass

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        raise NotImplementedError

    def get_cuda_graph_seq_len_fill_value(self):
        raise NotImplementedError

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        if forward_batch.forward_mode.is_idle():
            return q.new_empty(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        run = self.forward_decode if forward_batch.forward_mode.is_decode() else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        raise NotImplementedError


def sources() -> list[Path]:
    """Folders of sglang's packages that the environment names."""
    return [Path(folder) / "sglang" for folder in os.environ.get("TILECAST_SGLANG", "").split(os.pathsep) if folder]


def stand_ins(source: Path | None = None) -> dict[str, types.ModuleType]:
    """Modules by name; with ``source`` the base class is the real one."""
    made = {name: types.ModuleType(name) for name in (*MODULES, *_IMPORTED)}
    for name, names in _IMPORTED.items():
        vars(made[name]).update(names)
    vars(made["sglang.srt.model_executor.forward_batch_info"])["ForwardMode"] = ForwardMode
    base = made["sglang.srt.layers.attention.base_attn_backend"]
    vars(base)["AttentionBackend"] = AttentionBackend
    base.__dict__["source"] = source
    registry = made["sglang.srt.layers.attention.attention_registry"]
    backends: dict[str, Any] = {}
    vars(registry).update(
        ATTENTION_BACKENDS=backends, register_attention_backend=lambda name: lambda f: backends.setdefault(name, f)
    )
    arguments = vars(made["sglang.srt.server_args"])
    for prefix in ("", "DETERMINISTIC_"):
        names = arguments[f"{prefix}ATTENTION_BACKEND_CHOICES"] = ["triton"]
        arguments[f"add_{prefix.lower()}attention_backend_choices"] = names.extend
    return made


def load_base(made: dict[str, types.ModuleType], source: Path) -> None:
    """Run the real file of the base class in its module; the others of ``made`` must be in place."""
    file = source / "srt/layers/attention/base_attn_backend.py"
    module = made["sglang.srt.layers.attention.base_attn_backend"]
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), vars(module))


def tree(source: Path, file: str) -> ast.Module:
    """A file of sglang's as syntax."""
    return ast.parse((source / "srt" / file).read_text(encoding="utf-8"))


def functions(node: ast.AST) -> dict[str, list[str]]:
    """Names of the functions below a node, with their parameters' names."""
    return {
        n.name: [a.arg for a in (*n.args.posonlyargs, *n.args.args)] for n in ast.walk(node) if isinstance(n, ast.FunctionDef)
    }  # fmt: skip


def classes(node: ast.AST) -> dict[str, ast.ClassDef]:
    """Classes of a file by name."""
    return {n.name: n for n in ast.walk(node) if isinstance(n, ast.ClassDef)}


def attributes(node: ast.AST) -> set[str]:
    """Names that a class declares, or sets on ``self``."""
    declared = {n.target.id for n in ast.walk(node) if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    stored = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    return declared | stored
