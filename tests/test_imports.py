"""The import order, as data: a module imports only modules above it, and only those in its line.

Covered: every edge inside the package (an unknown one is a new line in the table, or a mistake); fairseq
at the edge alone, Triton in kernels/ alone; nobody imports `kernels` by itself; the package works where
neither fairseq nor Triton can be imported; what else it imports, a user's installation brings.
"""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "fairseq_tutel"

# The package's own __init__ is "fairseq_tutel"; all other names are relative to it.
CORE = {
    "drop_policies": "",
    "balance_weights": "",
    "custom": "",
    "contradictions": "balance_weights",
    "first_order": "",
    "comm": "",
    "comm.how": "",
    "comm.tuner": "comm.how",
    "comm.wire": "",
    "allocator": "",
    "kernels.activations": "",
    "kernels.groups": "",
    "kernels.opaque": "",
    "kernels.tuning_cache": "",
    "kernels.autotune": "kernels.tuning_cache",
    "kernels.weights": "",
    "kernels.ffn_by_expert": "kernels.activations kernels.groups kernels.weights",
    "kernels.ffn_by_products": "kernels.groups kernels.weights",
    "kernels.reference_route": "",
    "kernels.reference": (
        "kernels.activations kernels.ffn_by_expert kernels.groups kernels.reference_route"
    ),
    "kernels.tiles_config": "kernels.autotune",
    "kernels.triton_launch": "kernels.tiles_config",
    "kernels.triton_copy": "kernels.opaque",
    "kernels.triton_dispatch": "kernels.opaque kernels.triton_launch",
    "kernels.triton_route": "kernels.opaque kernels.triton_launch",
    "kernels.triton_activations": "",
    "kernels.triton_operands": "",
    "kernels.triton_tiles": "",
    "kernels.triton_gemm": (
        "kernels.groups kernels.opaque kernels.tiles_config kernels.triton_launch kernels.triton_operands "
        "kernels.triton_tiles"
    ),
    "kernels.triton_up": (
        "kernels.activations kernels.groups kernels.opaque kernels.tiles_config "
        "kernels.triton_activations kernels.triton_launch kernels.triton_operands kernels.triton_tiles"
    ),
    "kernels.triton_hidden": (
        "kernels.groups kernels.opaque kernels.tiles_config kernels.triton_activations "
        "kernels.triton_launch kernels.triton_operands kernels.triton_tiles"
    ),
    "kernels.triton_weight_grad": (
        "kernels.groups kernels.opaque kernels.tiles_config kernels.triton_launch kernels.triton_operands "
        "kernels.triton_tiles"
    ),
    "kernels.triton_ops": (
        "kernels.ffn_by_products kernels.reference kernels.triton_copy kernels.triton_dispatch "
        "kernels.triton_gemm kernels.triton_hidden kernels.triton_route kernels.triton_up "
        "kernels.triton_weight_grad"
    ),
    "kernels.grouped_mm": "kernels.activations kernels.groups kernels.opaque",
    "kernels": "kernels.ffn_by_products kernels.grouped_mm kernels.reference kernels.triton_ops",
    "kernels.variant": "kernels.tiles_config",
    "kernels.build_route": "kernels.triton_copy kernels.triton_route",
    "kernels.build_gemm": (
        "kernels.activations kernels.tiles_config kernels.triton_gemm kernels.triton_hidden "
        "kernels.triton_tiles kernels.triton_up kernels.triton_weight_grad kernels.variant"
    ),
    "kernels.build": "kernels.build_gemm kernels.build_route kernels.triton_dispatch kernels.variant",
    "config": "comm.how comm.wire contradictions custom drop_policies kernels",
    "initial": "",
    "token_loss": "first_order",
    "gates": "config custom initial",
    "capacity": "config",
    "choice": "kernels.reference_route",
    "slots": "",
    "fused_gate": "first_order",
    "routing": "capacity choice config drop_policies fused_gate kernels slots",
    "balance_bias": "",
    "comm.launcher": "",
    "comm.guard": "comm.launcher",
    "losses": "choice comm.guard routing",
    "metrics": "routing",
    "dispatch": "first_order kernels routing",
    "comm.first": "comm.guard",
    "comm.fingerprint": "comm.guard",
    "comm.meeting": "comm.guard",
    "comm.restart": "comm.guard comm.launcher",
    "comm.slices": "",
    "shards": "comm.slices",
    "shard_folder": "",
    "comm.topology": "comm.fingerprint comm.guard comm.slices",
    "comm.machine": "",
    "comm.gradients": "comm.guard comm.topology",
    "comm.zero": "comm.gradients comm.topology",
    "comm.zero_bytes": "comm.zero",
    "comm.cost": "comm.how comm.machine comm.zero_bytes",
    "comm.fit": "comm.cost comm.machine",
    "comm.lockstep": "comm.guard",
    "comm.zero_transfer": "comm.guard comm.zero",
    "comm.zero_reduce": "comm.gradients comm.guard comm.topology comm.zero comm.zero_transfer",
    "comm.zero_shards": "comm.gradients comm.topology comm.zero comm.zero_reduce comm.zero_transfer",
    "exploration": "config",
    "comm.regroup": "first_order",
    "comm.timer": "",
    "comm.asynchronous": "",
    "comm.trip": "comm.asynchronous comm.timer comm.wire first_order",
    "comm.stamp": "comm.guard",
    "comm.all_to_all": "comm.guard comm.stamp comm.trip",
    "comm.hierarchical": "comm.all_to_all comm.regroup comm.stamp comm.topology comm.trip kernels",
    "comm.pipeline": "comm.trip",
    "comm.copies": "comm.regroup comm.trip first_order",
    "exchange": (
        "comm.all_to_all comm.copies comm.hierarchical comm.how comm.pipeline comm.regroup comm.stamp "
        "comm.timer comm.topology comm.trip kernels.groups"
    ),
    "expert_stack": "comm.gradients comm.slices config kernels.groups shards",
    "expert_ffn": "dispatch expert_stack first_order kernels.groups kernels.weights routing",
    "custom_experts": "comm.slices config custom expert_stack initial kernels.groups",
    "experts": (
        "comm.slices config custom custom_experts expert_ffn expert_stack first_order initial kernels "
        "kernels.activations kernels.groups routing"
    ),
    "beside": "config custom initial kernels.activations",
    "comm.adaptive": (
        "comm.all_to_all comm.guard comm.slices comm.stamp comm.topology expert_stack first_order"
    ),
    "comm.static": "comm.adaptive comm.cost comm.how comm.machine comm.topology config",
    "comm.shards": "comm.first comm.guard comm.slices comm.topology expert_stack shard_folder shards",
    "comm.checkpoint": "comm.guard comm.shards comm.slices comm.topology expert_stack",
    "comm.balance": "balance_bias comm.guard",
    "moe_layer": (
        "balance_bias balance_weights beside capacity comm.adaptive comm.stamp comm.static comm.timer "
        "comm.topology config dispatch exchange expert_stack experts exploration gates kernels.autotune "
        "kernels.groups losses routing"
    ),
    "update_tuner": "comm.adaptive comm.cost comm.guard comm.how comm.launcher comm.tuner moe_layer",
    "tutel_options": "comm.how comm.topology config",
    "tutel_capacity": "capacity comm.guard tutel_options",
    "tutel_gates": "config tutel_options",
    "tutel_experts": "comm.slices config expert_stack experts initial kernels.groups tutel_options",
    "tutel_layer": (
        "capacity comm.guard comm.how comm.launcher comm.topology config expert_stack gates initial "
        "moe_layer tutel_capacity tutel_experts tutel_gates tutel_options"
    ),
    "fairseq_tutel": (
        "allocator comm.balance comm.how comm.topology config dispatch losses metrics moe_layer routing "
        "tutel_layer update_tuner"
    ),
    "safe_globals": "",
    "whole_files": "",
    "lease": "",
    "tools": "",
    "tools.checkpoint_file": "shards whole_files",
    "tools.one_file": "tools.checkpoint_file",
    "tools.convert_shards": "comm.slices shard_folder shards tools.checkpoint_file tools.one_file",
    "tools.average": "comm.zero_shards safe_globals shards tools.checkpoint_file",
    "tools.fairseq_names": "",
    "tools.our_options": "config",
    "tools.optimizer_state": "",
    "tools.meta_files": "tools.checkpoint_file tools.optimizer_state",
    "tools.meta_weights": "tools.meta_files tools.optimizer_state",
    "tools.meta_options": "tools.our_options",
    "tools.saved_options": "",
    "tools.convert_meta": (
        "tools.checkpoint_file tools.fairseq_names tools.meta_files tools.meta_options tools.meta_weights "
        "tools.optimizer_state tools.saved_options"
    ),
    "tools.convert_to_meta": (
        "comm.zero_shards tools.checkpoint_file tools.fairseq_names tools.meta_files tools.meta_options "
        "tools.meta_weights tools.optimizer_state tools.our_options tools.saved_options"
    ),
    "tools.tutel_layout": "",
    "tools.tutel_files": "tools.checkpoint_file",
    "tools.tutel_fairseq": "tools.fairseq_names tools.our_options tools.saved_options",
    "tools.convert_tutel": (
        "config tools.checkpoint_file tools.tutel_fairseq tools.tutel_files tools.tutel_layout"
    ),
    "tools.convert_to_tutel": (
        "shards tools.checkpoint_file tools.convert_tutel tools.tutel_fairseq tools.tutel_files "
        "tools.tutel_layout"
    ),
    "tools.late_parser": "",
    "tools.new_start": "",
    "tools.run_log": "",
    "tools.event_files": "tools.run_log",
    "tools.run_files": "tools.event_files tools.run_log",
    "tools.run_summary": "tools.run_log",
    "tools.figures": "",
    "tools.report_section": "",
    "tools.report_curves": "tools.figures tools.report_section tools.run_log",
    "tools.report_layers": "tools.figures tools.report_section tools.run_log",
    "tools.report_load": "tools.figures tools.report_section tools.run_log",
    "tools.report": (
        "fairseq_tutel tools.report_curves tools.report_layers tools.report_load tools.run_files "
        "tools.run_log tools.run_summary"
    ),
    "tools.user_dir": "",
    "tools.plan_figure": "comm.cost",
    "tools.options": "",
    "tools.plan": "comm.cost comm.machine tools.options tools.plan_figure",
    "tools.tune": (
        "comm.all_to_all comm.fit comm.hierarchical comm.launcher comm.machine comm.topology comm.trip "
        "experts kernels.groups tools.options"
    ),
}
EDGE = {
    "flags": "config",
    "plugin": "allocator flags safe_globals",
    "task_options": "flags",
    "ffn_step": "comm.checkpoint comm.topology config first_order metrics moe_layer",
    "elastic_iterator": "",
    "perplexity": "comm.guard",
    "together": "comm.lockstep ffn_step perplexity",
    "inference_mixin": "together",
    "optim.shard_plan": "comm.topology",
    "optim.moe_optimizer": (
        "comm.checkpoint comm.gradients comm.slices comm.topology comm.zero_shards shards"
    ),
    "optim.sharded": "comm.topology comm.zero_shards optim.moe_optimizer optim.shard_plan",
    "optim.sharded_fp16": "",
    "optim.moe_adam": "comm.gradients optim.sharded",
    "optim": "optim.moe_adam optim.moe_optimizer optim.sharded",
    "restore_file": "comm.first comm.guard shards whole_files",
    "opened_file": "comm.guard config custom whole_files",
    "run_config": (
        "comm.topology ffn_step flags optim.moe_optimizer optim.shard_plan plugin restore_file "
        "task_options"
    ),
    "task_mixin": (
        "comm.balance comm.checkpoint comm.guard comm.timer comm.topology elastic_iterator ffn_step flags "
        "inference_mixin optim.moe_optimizer run_config update_tuner"
    ),
    "tasks.moe_language_modeling": "task_mixin",
    "tasks.moe_translation": "task_mixin",
    "tasks.moe_masked_lm": "task_mixin",
    "tasks.moe_denoising": "task_mixin",
    "tasks": (
        "task_options tasks.moe_denoising tasks.moe_language_modeling tasks.moe_masked_lm "
        "tasks.moe_translation"
    ),
    "criterions.expert_log": "capacity ffn_step metrics",
    "criterions.gate_loss": "criterions.expert_log ffn_step first_order run_config",
    "criterions.moe_cross_entropy": "criterions.expert_log criterions.gate_loss token_loss",
    "criterions": "criterions.moe_cross_entropy",
    "models.agreement": "comm.fingerprint comm.guard fairseq_tutel flags run_config",
    "models.announce": "capacity comm.static comm.topology config expert_stack flags moe_layer",
    "models.changed": "comm.topology flags",
    "models.opened": "comm.fingerprint comm.topology config ffn_step models.agreement together",
    "models.build": (
        "balance_weights comm.checkpoint comm.gradients comm.guard comm.launcher comm.machine comm.static "
        "comm.topology config custom ffn_step flags kernels models.agreement models.announce "
        "models.changed models.opened run_config task_options update_tuner"
    ),
    "models.moe_transformer_lm": "flags models.build task_mixin",
    "models.moe_transformer": "flags models.build models.moe_transformer_lm task_mixin",
    "models.moe_roberta": "flags models.build models.moe_transformer_lm task_mixin",
    "models.moe_bart": "flags models.moe_roberta models.moe_transformer models.moe_transformer_lm",
    "models": (
        "models.moe_bart models.moe_roberta models.moe_transformer models.moe_transformer_lm plugin"
    ),
    "tools.ffn_layers": "ffn_step",
    "tools.by_layer": "tools.ffn_layers",
    "tools.expert_load": "config tools.by_layer tools.ffn_layers tools.run_files tools.run_log",
    "tools.moe_file": (
        "config flags tools.checkpoint_file tools.ffn_layers tools.new_start tools.saved_options"
    ),
    "tools.mixed_experts": "config tools.ffn_layers tools.moe_file",
    "tools.upcycle_layer": "capacity comm.slices config experts gates initial moe_layer",
    "tools.upcycle_optimizer": (
        "comm.zero_shards config tools.ffn_layers tools.optimizer_state tools.upcycle_layer"
    ),
    "tools.upcycle_model": (
        "config ffn_step flags models.build tools.ffn_layers tools.new_start tools.saved_options "
        "tools.upcycle_layer tools.upcycle_optimizer"
    ),
    "tools.upcycle": (
        "config flags plugin tools.checkpoint_file tools.ffn_layers tools.late_parser tools.moe_file "
        "tools.one_file tools.saved_options tools.upcycle_layer tools.upcycle_model"
    ),
    "tools.merge": (
        "config flags tools.by_layer tools.checkpoint_file tools.expert_load tools.ffn_layers "
        "tools.mixed_experts tools.moe_file tools.one_file"
    ),
    "tools.prune": (
        "config tools.by_layer tools.checkpoint_file tools.expert_load tools.ffn_layers "
        "tools.mixed_experts tools.moe_file tools.one_file"
    ),
    "tools.dense_layer": "capacity config tools.ffn_layers tools.moe_file tools.upcycle_layer",
    "tools.dense": (
        "criterions.gate_loss flags tools.by_layer tools.checkpoint_file tools.dense_layer "
        "tools.ffn_layers tools.moe_file tools.one_file tools.saved_options"
    ),
    "tools.inspected_shards": "shards",
    "tools.inspected": (
        "shards tools.expert_load tools.ffn_layers tools.inspected_shards tools.our_options "
        "tools.saved_options whole_files"
    ),
    "tools.inspected_text": "tools.inspected",
    "tools.inspect_file": "safe_globals tools.checkpoint_file tools.inspected tools.inspected_text",
    "save_shards": "comm.checkpoint comm.first expert_stack optim.moe_optimizer",
    "launch": "comm.guard comm.launcher comm.meeting",
    "one_writer": "comm.first lease shard_folder whole_files",
    "wrapped": (
        "comm.checkpoint comm.guard comm.restart comm.topology flags launch one_writer opened_file "
        "optim.moe_optimizer optim.shard_plan optim.sharded_fp16 run_config save_shards shards together "
        "whole_files"
    ),
    "train": "comm.topology plugin",
    "run": "comm.topology plugin",
    "tools.flag_list": "criterions.gate_loss flags",
    "tools.environment": "kernels kernels.autotune kernels.tuning_cache",
    "tools.convert": (
        "safe_globals tools.convert_meta tools.convert_shards tools.convert_to_meta "
        "tools.convert_to_tutel tools.convert_tutel tools.dense tools.late_parser tools.merge tools.prune "
        "tools.upcycle"
    ),
    "__main__": (
        "fairseq_tutel tools.average tools.convert tools.environment tools.flag_list tools.inspect_file "
        "tools.plan tools.report tools.tune tools.user_dir"
    ),
}
TABLE = {**CORE, **EDGE}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "fairseq_tutel"


# pathlib does not look behind the link to kernels/ in every Python.
FILES = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")}
MODULES = {module_name(path): path for path in sorted(FILES)}


def imported_names(path: Path) -> set[str]:
    """Return the absolute names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_modules(names: set[str]) -> set[str]:
    """Return the modules of this package among absolute names."""
    found = set()
    for name in names:
        top, *rest = name.split(".")
        if top == "fairseq_tutel":
            while rest and ".".join(rest) not in MODULES:
                rest.pop()  # a function or class of the module
            found.add(".".join(rest) or "fairseq_tutel")
    return found


def top_names(name: str) -> set[str]:
    return {imported.split(".")[0] for imported in imported_names(MODULES[name])}


def test_the_table_holds_every_module_once():
    assert set(TABLE) == set(MODULES)
    assert not CORE.keys() & EDGE.keys()


def test_every_edge_of_the_table_points_up():
    above = set()
    for name, allowed in TABLE.items():
        assert set(allowed.split()) <= above, name
        above.add(name)


@pytest.mark.parametrize("name", MODULES)
def test_a_module_imports_what_the_table_says(name):
    assert own_modules(imported_names(MODULES[name])) == set(TABLE[name].split())


@pytest.mark.parametrize("name", CORE)
def test_the_core_never_imports_fairseq(name):
    assert not top_names(name) & {"fairseq", "fairseq_cli", "hydra", "omegaconf"}


@pytest.mark.parametrize("name", MODULES)
def test_triton_is_imported_in_kernels_alone(name):
    assert name.startswith("kernels") or "triton" not in top_names(name)


@pytest.mark.parametrize("name", MODULES)
def test_nobody_imports_kernels_by_itself(name):
    assert "kernels" not in top_names(name)


WITHOUT = """
import sys
sys.modules["fairseq"] = sys.modules["triton"] = sys.modules["safetensors"] = None
import torch
import fairseq_tutel as ft
layer = ft.MoELayer(ft.MoEConfig(model_dim=4, hidden_dim=8, num_experts=2))
y, output = layer(torch.ones(3, 4))
(y.sum() + output.balance_loss).backward()
assert "omegaconf" not in sys.modules
"""


def test_the_core_works_with_torch_and_numpy_alone():
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


# What fairseq brings along.
BROUGHT = {"fairseq_cli", "hydra", "omegaconf"}


def test_what_is_imported_stands_in_what_users_install():
    """The extras for tests and development are not theirs."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lists = [project["dependencies"], *(extras[name] for name in extras.keys() - {"test", "dev"})]
    named = {re.match(r"[\w-]+", entry)[0] for entries in lists for entry in entries}
    imported = set().union(*map(top_names, MODULES)) - sys.stdlib_module_names
    assert imported - BROUGHT - {"fairseq", "fairseq_tutel"} <= named
    assert "fairseq-fixed" in named
