"""A process in which Triton interprets its kernels on the CPU.

Triton selects the interpreter when it is imported, so these tests need a separate process.
"""

import os
import warnings


def interpret(_: int = 0) -> None:
    """Enable the interpreter in this process; this must run before Triton is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    warnings.simplefilter("ignore")
    redirect_once()


def interpret_with_gpu(_: int = 0) -> None:
    """Enable the interpreter in this process, and register the device of `python_gpu.gpu`."""
    interpret()
    import python_gpu

    python_gpu.register()  # before autograd starts its threads


def redirect_once() -> None:
    """Redirect triton.language once per kernel launch, not again for each function that a kernel calls.

    Triton searches the complete module at every such call, which takes two fifths of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # with other versions of Triton, tests are only slower
        return
    redirect = interpreter._patch_lang

    def patch_lang(fn):
        used = [each for each in fn.__globals__.values() if each is tl or each is tl.core]
        if any(tl.core.is_builtin(each.load) for each in used):
            return redirect(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_lang
