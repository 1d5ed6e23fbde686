"""Classes of the user's own, named by where they stand: package.module.Class."""

import importlib


def is_custom(name: str) -> bool:
    """Whether a gate's or expert's type names a class instead of one of ours."""
    return "." in name


def load_class(label: str, name: str) -> type:
    """Import the class that an option names.

    Args:
        label: of the option, for the message.
        name: package.module.Class; the module must be importable, say by PYTHONPATH.

    Raises:
        ValueError: there is no such module or class.
    """
    module_name, _, class_name = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{label} is {name!r}, which cannot be imported ({error}); give package.module.Class of a "
            "module on PYTHONPATH."
        ) from error
    if not isinstance(found, type):
        raise ValueError(f"{label} is {name!r}, which is no class; give package.module.Class.")
    return found
