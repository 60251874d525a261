"""The errors of the library: each message names the culprit and the way out."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings

import jax


class DynaFlowError(Exception):
    """Base class of the errors that this library raises on purpose.

    A strategy that is made with an impossible number is a ``ValueError``, as for any class.
    """


class RuleError(DynaFlowError):
    """A partition rule is malformed, or asks for an operator that would cut through a dependency."""


class RuleWarning(UserWarning):
    """A partition rule, or a mark, had no effect on the operators."""


class SplitError(DynaFlowError):
    """The batch cannot be split as asked: sizes that do not add up, or an axis that does not divide or is not there."""


class BatchMixingError(SplitError):
    """Splitting would change the result, or nothing proves that it would not."""


class ScheduleError(DynaFlowError):
    """A strategy asked for something impossible: an operator twice, before its inputs, or never."""


class PlanError(DynaFlowError):
    """A plan does not fit the function it is applied to, or its JSON is damaged."""


class DispatchWarning(UserWarning):
    """A plan that was to be dispatched runs as one XLA program instead."""


class TuningWarning(UserWarning):
    """A measured choice could not be read, or could not be kept."""


# Where frames between the user's line and ours may come from.
_LIBRARIES = (
    *(os.path.dirname(os.path.abspath(path)) + os.sep for path in (__file__, str(jax.__file__))),
    contextlib.__file__,
    functools.__file__,
)


def warn_user(message: str, category: type[Warning]) -> None:
    """Warns of the line of the user's code that led here."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
