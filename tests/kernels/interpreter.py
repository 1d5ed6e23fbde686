"""These functions prepare a process in which Triton interprets kernels on the CPU.

Triton selects its interpreter at import, so tests of interpreted kernels need a separate process.
"""

import os
import warnings


def interpret(_: int = 0) -> None:
    """Enable Triton's interpreter in this process, before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    redirect_once()


def interpret_with_gpu(_: int = 0) -> None:
    """Enable Triton's interpreter in this process, and register the simulated GPU of `python_gpu`."""
    interpret()
    import python_gpu

    python_gpu.register()  # Register the device before autograd starts its threads.


def redirect_once() -> None:
    """Patch triton.language once per kernel launch, not once per function that a kernel calls.

    Each patch of triton.language searches the complete module, which takes two fifths of the interpreter's
    time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    # In versions of Triton without this class, nothing is patched, and tests are only slower.
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    redirect = interpreter._patch_lang

    def patch_lang(fn):
        used = [each for each in fn.__globals__.values() if each is tl or each is tl.core]
        if any(tl.core.is_builtin(each.load) for each in used):
            return redirect(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang
