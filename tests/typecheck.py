"""What checks annotations; not in conftest.py, because every folder of tests may have one of that name."""

import beartype


def check(function):
    """Checks the annotations of a function at every call.

    Constructors are left alone: jax rebuilds pytrees out of tracers, shapes and None, which no field annotation allows.
    """
    return function if function.__name__ == "__init__" else beartype.beartype(function)
