"""Tests `Run`, the state of a command, and the list of attributes that the plugin sets on other objects."""

import ast
from pathlib import Path

import pytest

from fairseq_tutel.plugin.run_state import Run

PACKAGE = Path(__file__).parents[2] / "fairseq_tutel"
INTEGRATION = [
    path for folder in ("plugin", "models", "tasks") for path in sorted((PACKAGE / folder).rglob("*.py"))
]


def test_run_state_fields_are_restored_after_an_error():
    run = Run(cfg=1)
    with pytest.raises(KeyError), run.having(cfg=2):
        assert run.cfg == 2
        raise KeyError
    assert run.cfg == 1


# Attributes that files of the package set on objects of fairseq or torch. Attributes of
# configurations, and data and gradients of tensors, are not listed.
CHANGED = {
    # The package changes the classes of tasks, iterators, data sets and models that fairseq constructed.
    "plugin/registration/variants.py": "__class__ __dataclass add_args",
    "plugin/registration/process.py": "_max_len",  # _max_len = 0 ends a thread that reads batches.
    "plugin/registration/wrapped.py": "excepthook",  # The new excepthook prints errors as sentences.
    "plugin/feed_forward.py": "fc1 fc2 activation_fn ffn_layernorm",  # Stock layers call these modules.
    # fairseq's tasks read source_langs and target_langs. One of the tasks reads `args`, but never sets it.
    "plugin/hub_interfaces.py": "args source_langs target_langs bpe",
    # torch's DDP ignores the listed parameters. max_epoch = -1 ends a run that has no update left.
    "plugin/training/own_layers.py": "_ddp_params_and_buffers_to_ignore max_epoch",
    # A save thread passes copies with these attributes to fairseq's save_checkpoint.
    "plugin/training/background_save.py": "get_checkpoint_dict no_save save_checkpoint",
    "plugin/opening/load.py": "load",  # While fairseq opens a checkpoint, torch.load memory-maps it.
    # After a signal, valid_step ends the validation. _aggregate_logging_outputs also counts signals.
    "plugin/training/preemption.py": "valid_step _aggregate_logging_outputs",
    "plugin/training/startup.py": "_buffer _cpu_buffer",  # fairseq would allocate the buffers on a GPU.
    "plugin/criterions/teacher.py": "is_of_teacher",  # Marks the copy of the task that builds the teacher.
    # The first attribute makes fairseq keep loaded state. Trainer compares `__name__` with checkpoints.
    "plugin/optim/zero.py": "disable_mem_eff_fp16_loading_hack __name__ holds_masters",
    "parallel/groups.py": "param_group",  # The only attribute that fairseq copies to fp32 masters.
    "parallel/gradients.py": "expert _tutel_expert root_scaled",  # The attributes mark parameters.
    "parallel/call_id.py": "_torchdynamo_disable count",  # `count` counts the calls of a layer.
    "parallel/rendezvous.py": "daemon",  # A daemon timer does not keep the process alive.
    "parallel/zero_state.py": "zero_hook",  # A second optimizer of a model removes the hook of the first.
}
CONFIGURATIONS = {"cfg", "root", "distributed", "section", "node", "member"}


def set_from_outside(path):
    """Yield the names of attributes that a source file sets on objects other than `self`."""
    module = ast.parse(path.read_text())
    builders = [
        node
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef) and "classmethod" in map(ast.unparse, node.decorator_list)
    ]
    built = {node for builder in builders for node in ast.walk(builder)}
    for node in set(ast.walk(module)) - built:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            is_configuration = owner.split(".")[0] in CONFIGURATIONS
            if owner not in ("self", "ctx") and not is_configuration and node.attr not in ("data", "grad"):
                yield node.attr


def test_every_attribute_that_the_plugin_sets_on_other_objects_is_listed():
    files = [*INTEGRATION, *(PACKAGE / "parallel").glob("*.py")]
    found = {(p.relative_to(PACKAGE).as_posix(), name) for p in files for name in set_from_outside(p)}
    assert found == {(file, name) for file, names in CHANGED.items() for name in names.split()}
