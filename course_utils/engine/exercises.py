"""Exercises: what is asked (Exercise, Case, Mistake), the judgement (examine), and what a notebook calls: check, hint, solution.

A case runs the learner's function and the reference on equal, fresh inputs and compares what came. The judgement never raises and never
hangs on what a learner writes. The time limit needs signals and the main thread, which Linux and macOS kernels have; elsewhere (Windows, a
thread) an endless loop is ended by interrupting the kernel. Nothing ends one inside a single call of C, such as sum(itertools.count()).
"""
import ast
import contextlib
import dataclasses
import enum
import functools
import importlib
import inspect
import io
import os
import pathlib
import pkgutil
import re
import signal
import sys
import sysconfig
import textwrap
import threading
import traceback
from collections.abc import Callable

import numpy as np
import torch

from course_utils.engine import display
from course_utils.engine import progress as progress_file
from course_utils.engine.compare import brief, difference, kind

REPO = progress_file.REPO
LOOKING = 20.0  # seconds for comparing and showing what came, the calls themselves not counted


class Outcome(str, enum.Enum):
    NOT_ATTEMPTED = "not attempted"
    WRONG = "wrong"
    RAISED = "raised"
    RIGHT = "right"


@dataclasses.dataclass(frozen=True)
class Mistake:
    """A wrong function that people really write, and the sentence that whoever wrote it should read."""

    says: str
    gives: Callable


@dataclasses.dataclass(frozen=True)
class Case:
    """One situation that the function must get right; its name is a sentence. `args()` makes fresh, equal inputs at each call."""

    name: str
    args: Callable[[], tuple]
    memory: str | None = None  # "view": shares memory with the first tensor given; "copy": shares none with any
    strides: bool = False  # the result's strides count too
    tolerance: float = 0.0  # relative and absolute, for floating values; 0 is exact
    mutates: bool = False  # the inputs are meant to change; they are compared after the call, unless verify judges them
    raises: type | None = None  # the call must raise this
    verify: Callable | None = None  # verify(result, *args) -> None or a complaint, in place of the reference's result
    watch: Callable | None = None  # watch(call) runs call() once and returns None or a complaint: bytes allocated, operations used


@dataclasses.dataclass(frozen=True)
class Exercise:
    lesson: str
    solution: Callable
    hints: tuple
    cases: tuple
    mistakes: tuple = ()
    time_limit: float = 5.0  # seconds for one call

    @property
    def name(self):
        return self.solution.__name__


@dataclasses.dataclass(frozen=True)
class Report:
    outcome: Outcome
    title: str
    lines: tuple = ()  # (kind, text); kind is "text" or "code"

    @property
    def text(self):
        return "\n".join([self.title, *(line for _, line in self.lines)])


@functools.cache
def registry():
    """Every exercise of the course by name; names are unique."""
    import course_utils.exercises as package

    found = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(package.__path__)):
        for exercise in importlib.import_module(f"{package.__name__}.{module}").EXERCISES:
            if exercise.name in found:
                raise ValueError(f"two exercises are called {exercise.name}")
            found[exercise.name] = exercise
    return found


# ── what a notebook calls ─────────────────────────────────────────────────────────────────────────────────────────────


def check(function):
    """Judge the learner's function, show the outcome and keep it in the progress file.

    Takes the function itself (or its name). With COURSE_STRICT=1 any outcome but right raises AssertionError.
    """
    try:
        exercise, function = _find(function)
    except LookupError as error:
        report, exercise = Report(Outcome.WRONG, str(error)), None
    else:
        report = examine(exercise, function)
        progress_file.record_exercise(exercise.lesson, exercise.name, report.outcome.value)
    state = {"not attempted": "open"}.get(report.outcome.value, report.outcome.value)
    lines = list(report.lines)
    if exercise and report.outcome is not Outcome.RIGHT:
        lines.append(("text", f"hint({exercise.name}) gives the next of {len(exercise.hints)} hints; "
                              f"solution({exercise.name}) shows a reference."))
    display.card(state, report.title, lines)
    if os.environ.get("COURSE_STRICT") == "1" and report.outcome is not Outcome.RIGHT:
        raise AssertionError(report.text)


_hints_given = {}


def hint(function):
    """Show the next hint for an exercise; after the last one, say so."""
    try:
        exercise, _ = _find(function)
    except LookupError as error:
        return display.card("wrong", str(error))
    number = _hints_given.get(exercise.name, 0)
    if number == len(exercise.hints):
        return display.card("note", f"That was the last hint for {exercise.name}.",
                            [("text", f"solution({exercise.name}) shows a reference; nothing later needs this exercise.")])
    _hints_given[exercise.name] = number + 1
    progress_file.record_hint(exercise.lesson, exercise.name, number + 1)
    display.card("note", f"Hint {number + 1} of {len(exercise.hints)} for {exercise.name}", [("text", exercise.hints[number])])


def solution(function, now=False):
    """Show the source of the reference, once it has been attempted or with now=True."""
    try:
        exercise, _ = _find(function)
    except LookupError as error:
        return display.card("wrong", str(error))
    entry = progress_file.read()["exercises"].get(f"{exercise.lesson}/{exercise.name}", {})
    if not now and not entry.get("attempts"):
        return display.card("note", f"{exercise.name} has not been attempted yet.",
                            [("text", f"Write something, check it, and ask again; or solution({exercise.name}, now=True).")])
    display.card("note", f"One way to write {exercise.name}", [("code", source_of(exercise))])


def source_of(exercise):
    """The reference's source as it stands in the package: shown to the learner and pasted into the solved notebook."""
    return textwrap.dedent(inspect.getsource(exercise.solution)).rstrip()


def _find(thing):
    """(exercise, function) for a function, or for the name under which the notebook holds it. LookupError says what is wrong."""
    names = getattr(_shell(), "user_ns", {})
    if isinstance(thing, str):
        if thing not in registry():
            raise LookupError(f"There is no exercise called {brief(thing)}.")
        return registry()[thing], names.get(thing)
    try:
        name = getattr(thing, "__name__", None)
    except Exception:  # a learner's own __getattr__ may do anything
        name = None
    if isinstance(name, str) and name in registry():
        return registry()[name], thing
    bound = [n for n in registry() if n in names and names[n] is thing]  # a lambda, a partial, an imported function
    if bound:
        return registry()[bound[0]], thing
    given = f"a function called {name}" if callable(thing) and name else "None" if thing is None else f"{kind(thing)}, {brief(thing)}"
    raise LookupError(f"This takes the function of an exercise, as in check({next(iter(registry()))}); it was given {given}.")


def _shell():
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


# ── the judgement ─────────────────────────────────────────────────────────────────────────────────────────────────────


def examine(exercise, function):
    """Judge a function against an exercise's cases, in order, up to the first that fails. Returns a Report; shows and keeps nothing."""
    try:
        return _limited(LOOKING, lambda: _examine(exercise, function))
    except BaseException as error:  # what a learner returns may do anything when it is looked at
        said = f"did not end within {LOOKING:g} s" if isinstance(error, TimeLimit) else f"raised {type(error).__name__}: {_message(error)}"
        return Report(Outcome.WRONG, f"{exercise.name}: its result cannot be compared", (("text", f"Looking at what came {said}."),))


def _examine(exercise, function):
    name = exercise.name
    if not callable(function):
        return Report(Outcome.WRONG, f"{name}: this is {kind(function)}, not a function",
                      (("text", f"Run the cell that defines {name} again, and give the name to nothing else."),))
    if is_starter(exercise, function):
        return Report(Outcome.NOT_ATTEMPTED, f"{name}: not attempted yet",
                      (("text", f"It is still as it was given. Change {name} in its cell, run that cell, then run this one again."),))
    for number, case in enumerate(exercise.cases, 1):
        if report := _judge(exercise, function, case, f"case {number} of {len(exercise.cases)}"):
            return report
    lines = ()
    if exercise.solution.__module__.startswith("course_utils.toolkit."):
        lines = (("text", f"It is yours to keep: from {exercise.solution.__module__} import {name}"),)
    return Report(Outcome.RIGHT, f"{name}: right, in {len(exercise.cases)} cases", lines)


def _judge(exercise, function, case, which):
    """None where the case is met, else the report that says why it is not."""
    args, wanted_args = _fresh(case), _fresh(case)
    inputs = _call_text(exercise, args)
    if misfit := _misfit(function, args):
        return Report(Outcome.WRONG, f"{exercise.name}: wrong arguments", (("code", inputs), ("text", misfit)))
    wanted = _run(exercise.solution, wanted_args, 60.0)
    if not isinstance(wanted.error, case.raises or type(None)):
        return Report(Outcome.WRONG, f"{exercise.name}: the course cannot judge this here",
                      (("code", inputs), ("text", "Its own solution fails on this machine; that says nothing about yours."),
                       ("code", _learner_traceback(wanted.error))))
    came = _run(function, args, exercise.time_limit, case.watch)

    def wrong(*sentences, shown=True):
        # where verify judges, the reference's result is one of many right ones: its complaint says what is expected
        expected = "" if case.verify else "\nexpected  " + (f"{case.raises.__name__} raised" if case.raises else brief(wanted.result))
        block = inputs + (f"{expected}\ncame      {brief(came.result)}" if shown else "")
        said = [("text", s) for s in sentences if s]
        if came.printed:
            said.append(("code", "it printed\n" + textwrap.indent(came.printed.rstrip(), "  ")))
        return Report(Outcome.WRONG, f"{exercise.name}: wrong where {case.name} ({which})", (("code", block), *said))

    if isinstance(came.error, TimeLimit):
        return wrong(f"It did not come back within its time limit of {exercise.time_limit:g} s. Does its loop end?", shown=False)
    if came.error is not None:
        if case.raises and isinstance(came.error, case.raises):
            return None
        said = [f"Here it should raise {case.raises.__name__}."] if case.raises else []
        said += [meaning for words, meaning in _MEANINGS.items() if words in _message(came.error)]
        return Report(Outcome.RAISED, f"{exercise.name}: raised {type(came.error).__name__} where {case.name} ({which})",
                      (("code", inputs), ("code", _learner_traceback(came.error)), *(("text", s) for s in said)))
    fault = _fault(exercise, case, wanted, wanted_args, came, args)
    if fault is None:
        return None
    about, sentence = fault
    return wrong(_sentence(sentence), _misconception(exercise, case, wanted, wanted_args, came, args, fault), shown=about == "value")


_MEANINGS = {  # words of a message of torch's that says little: what it means
    "out of bounds for storage": "The view reaches past the end of its storage: are there too many windows, or is a stride too large?",
    "desired ordering of dimensions": "permute names every dimension, those in front too; movedim takes negative numbers as well.",
}


def _fault(exercise, case, wanted, wanted_args, came, args):
    """(what it is about, the complaint) for what a call gave and did, or None where both are as they should be."""
    if case.raises:
        returned = came.result if isinstance(came.result, type) else type(came.result)
        cure = ": raise it, do not return it" if issubclass(returned, BaseException) else ""
        return "value", f"here it should raise {case.raises.__name__}{cure}"
    if came.result is None and wanted.result is not None:
        if came.printed:
            return "value", "it prints its answer and returns nothing. A caller gets None: use return."
        if any(not other.raises and _run(exercise.solution, _fresh(other), 60.0).result is None for other in exercise.cases):
            return "value", f"None came where {kind(wanted.result)} was expected: on purpose, or because it returns nothing on this path"
        return "value", "it returns nothing (None). Is there a return on every path?"
    judged = case.mutates and case.verify  # what the inputs have become is then for verify to say
    changed = None if judged else _first_change(exercise, wanted_args if case.mutates else _fresh(case), args, case.tolerance)
    if changed and case.verify:  # verify looks at the input, which is no longer what it was
        return "input", f"the call changed its input: {changed}"
    said = case.verify(came.result, *args) if case.verify else difference(wanted.result, came.result, case.tolerance, case.strides)
    if said:
        return "value", said
    if changed:
        said = "it left its input in another state than expected" if case.mutates else "the result is right, but the call changed its input"
        return "input", f"{said}: {changed}"
    if came.complaint:
        return "watch", came.complaint
    said = _memory_complaint(case.memory, came.result, args)
    return ("memory", said) if said else None


def _misconception(exercise, case, wanted, wanted_args, came, came_args, fault):
    """The sentence of the first known mistake that does, on this case, what the learner's function did, with the same fault.

    The learner's function has met the cases before this one, so only a mistake that meets them too can be what was written.
    """
    earlier = exercise.cases[: exercise.cases.index(case)]
    for mistake in exercise.mistakes:
        args = _fresh(case)
        call = _run(mistake.gives, args, 5.0, case.watch)
        same = call.error is None and difference(call.result, came.result, case.tolerance, case.strides) is None
        if same and not (case.mutates and _first_change(exercise, args, came_args, case.tolerance)):
            known = _fault(exercise, case, wanted, wanted_args, call, args)
            # results that do not show what is wrong, such as a loader, are told apart by what verify says of them
            same = known and known[0] == fault[0] and (not case.verify or _wording(known[1]) == _wording(fault[1]))
            if same and all(_meets(exercise, mistake.gives, met) for met in earlier):
                return mistake.says
    return None


def _wording(sentence):
    return re.sub("[0-9.]+", "#", sentence)


def _meets(exercise, function, case):
    args, wanted_args = _fresh(case), _fresh(case)
    wanted, came = _run(exercise.solution, wanted_args, 60.0), _run(function, args, exercise.time_limit, case.watch)
    if came.error is not None:
        return isinstance(came.error, case.raises or ())
    return _fault(exercise, case, wanted, wanted_args, came, args) is None


def _fresh(case):
    with _seeded():
        return case.args()


@dataclasses.dataclass
class _Call:
    result: object = None
    error: BaseException | None = None
    printed: str = ""
    complaint: str | None = None


_SETTINGS = (  # torch's global settings that a function may leave changed
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, torch.set_default_device),
)


def _run(function, args, limit, watch=None):
    """Call it: seeded, with its printing kept, within the limit, and with torch's global settings as they were afterwards."""
    call, printed = _Call(), _Printed()

    def run_once():
        call.result = function(*args)

    before = [get() for get, _ in _SETTINGS]
    try:
        with _seeded(), _without_exit(), contextlib.redirect_stdout(printed):
            limited = functools.partial(_limited, limit, run_once)  # the limit never interrupts what watch sets up and takes down
            call.complaint = limited() if watch is None else watch(limited)
    except BaseException as error:  # also SystemExit and the like: a learner's exit() must not end the kernel
        call.error, call.result = error, None
    finally:
        for (get, put), value in zip(_SETTINGS, before):
            if get() != value:
                put(value)
    if inspect.iscoroutine(call.result):
        call.result.close()  # else Python warns, much later, that it was never awaited
    call.printed = printed.text
    return call


@contextlib.contextmanager
def _seeded():
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []):
        torch.manual_seed(0)
        yield


@contextlib.contextmanager
def _without_exit():
    """In a notebook exit() does not raise SystemExit but has the kernel end soon after: let it raise."""
    shell = _shell()
    if shell is not None:
        shell.ask_exit = sys.exit
    try:
        yield
    finally:
        if shell is not None:
            del shell.ask_exit


class _Printed(io.TextIOBase):
    """Keeps the beginning of what is printed; an endless print must not fill the memory."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        if len(self.text) < 2000:
            self.text += text[:2000]
        return len(text)


class TimeLimit(BaseException):
    """Not an Exception, so that a learner's `except Exception` does not swallow it."""


def _limited(seconds, function):
    """function(), ended by TimeLimit after so many seconds where there are signals."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        return function()
    gate, rings = None, 0

    def call():
        nonlocal gate
        gate = sys._getframe()
        return function()

    def ring(signum, frame):
        nonlocal rings
        while frame is not None and frame is not gate:
            frame = frame.f_back
        if frame is None:
            return  # the call is over: never interrupt our own code
        # A bare `except:` or a `finally: continue` swallows this one. The next comes within microseconds, each a little later than
        # the last, so that one of them falls into the handler itself and gets out.
        rings += 1
        signal.setitimer(signal.ITIMER_REAL, rings % 200 * 2e-6 + 2e-6, 0.05)
        raise TimeLimit

    handler = signal.signal(signal.SIGALRM, ring)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, 0.05)
    try:
        result = call()
        if rings:  # it swallowed the last of them and came back all the same
            raise TimeLimit
        return result
    finally:
        gate = None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # the one that this limit paused, if any


def _memory_complaint(memory, result, args):
    """"view" and "copy" judged by the storage; what has no storage to share (a number, an empty tensor) is not judged."""
    given = [memory_range for arg in _flat(args) if (memory_range := _memory_range(arg))]
    for tensor in _flat((result,)):
        if memory is None or not isinstance(tensor, torch.Tensor) or not (own := _memory_range(tensor)):
            continue
        shares = [own[0] < high and low < own[1] for low, high in given]
        if memory == "view" and shares and not shares[0]:
            return f"the values are right, but it is a copy ({own[1] - own[0]:,} bytes) where the input or a view of it will do"
        if memory == "copy" and any(shares):
            return "the values are right, but it is a view of the input where a copy was asked for: writing into one changes the other"
    return None


def _flat(values):
    return [v for value in values for v in (value if isinstance(value, (list, tuple)) else (value,))]


def _memory_range(thing):
    """Where the whole memory behind a tensor or an array begins and ends; None for what has none."""
    if isinstance(thing, torch.Tensor) and thing.layout == torch.strided and thing.device.type != "meta" and thing.numel():
        begin = thing.untyped_storage().data_ptr()
        return begin, begin + thing.untyped_storage().nbytes()
    if isinstance(thing, np.ndarray) and thing.size:
        while isinstance(thing.base, np.ndarray):
            thing = thing.base
        return thing.ctypes.data, thing.ctypes.data + thing.nbytes
    return None


def _first_change(exercise, before, after, tolerance):
    names = list(inspect.signature(exercise.solution).parameters)
    for i, (b, a) in enumerate(zip(before, after)):
        if said := difference(b, a, tolerance, strides=True):
            return said if len(before) == 1 else f"{names[i]}: {said}" if i < len(names) else f"argument {i}: {said}"
    return None


def _misfit(function, args):
    """Why the function cannot be called with these arguments, or None."""
    try:
        inspect.signature(function).bind(*args)
    except TypeError as error:
        return f"It is called with {len(args)} argument{'s' * (len(args) != 1)}, which does not fit its signature: {error}."
    except ValueError:
        pass  # some built-in functions have no signature
    return None


def _call_text(exercise, args):
    names = list(inspect.signature(exercise.solution).parameters.values())
    if names and names[0].kind is inspect.Parameter.VAR_POSITIONAL:
        shown = [f"{brief(a)}" for a in args]
    else:
        shown = [f"{p.name}={brief(a)}" for p, a in zip(names, args)]
    line = ", ".join(shown)
    if len(line) > 90:
        line = "\n" + ",\n".join(f"    {s}" for s in shown) + ",\n"
    return f"{exercise.name}({line})"


def _sentence(text):
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "?")) else ".")


def _message(error):
    try:
        return str(error)
    except BaseException:
        return "(its own message cannot be shown)"


def _learner_traceback(error):
    """The exception with the frames of the learner's own code: nothing of this package, of torch or of Python's library."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    lines = [f"line {f.lineno}, in {f.name}" + (f"\n    {f.line}" if f.line else "") for f in frames]
    if len(lines) > 6:
        lines[2:-2] = [f"… {len(lines) - 4} more calls …"]
    message = "\n".join(line[:300] for line in _message(error).splitlines()[:8])  # torch has messages of pages
    return "\n".join([*lines, f"{type(error).__name__}: {message}" if message else type(error).__name__])


_PLACES = {str(pathlib.Path(p)) for p in (*sysconfig.get_paths().values(), REPO / "course_utils") if p}
_LIBRARIES = tuple(_PLACES - {sys.prefix, sys.base_prefix})


def _is_library(filename):
    return filename.startswith((*_LIBRARIES, "<frozen")) or "site-packages" in filename or "dist-packages" in filename


# ── the starter, as the lesson's source has it ────────────────────────────────────────────────────────────────────────


def is_starter(exercise, function):
    """Is the function still as the lesson gives it, comments aside? Also true of an empty body, wherever it comes from."""
    try:
        node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except Exception:  # no source, or no function at all
        return False
    if not isinstance(node, ast.FunctionDef):
        return False
    return _is_empty(node) or ast.dump(node) in starters(exercise.lesson).get(node.name, ())


def _is_empty(node):
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    return all(isinstance(s, ast.Pass) or (isinstance(s, ast.Expr) and getattr(s.value, "value", 0) is Ellipsis) for s in body)


@functools.cache
def starters(lesson):
    """{name: {syntax trees}} of the functions that the lesson's source defines; empty where the sources are not installed."""
    found = {}
    path = REPO / "notebooks" / "src" / f"{lesson}.py"
    if path.is_file():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, set()).add(ast.dump(node))
    return found
