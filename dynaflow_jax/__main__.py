"""``python -m dynaflow_jax``."""

import os
import sys

from absl import logging

from dynaflow_jax.cli import main

if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)  # JAX tells of every platform that it looks for
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # of a reader such as head, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code)
