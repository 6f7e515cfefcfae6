"""start(): what the first cells of every lesson settle: parameters, seed, device, and one line about the machine."""
import dataclasses
import difflib
import os
import platform
import sys

PARAMETERS = ("DEVICE", "SEED", "QUICK")
_current = {"lesson": None}  # the lesson of this kernel, for predictions and for telling a first start from a repeated one


@dataclasses.dataclass(frozen=True)
class Lesson:
    """What a lesson's cells ask for: `lesson.device` to put tensors on, `lesson.pick(quick, full)` to choose a size."""

    name: str
    device: object
    seed: int
    quick: bool

    def pick(self, quick, full):
        """`quick` in a quick pass (QUICK = True), `full` otherwise."""
        return quick if self.quick else full


def start(lesson, DEVICE="auto", SEED=0, QUICK=True):
    """Begin a lesson: check the parameters, seed, choose the device, say what machine this is and how far you are.

    DEVICE: "auto" (the DEVICE environment variable, else CUDA where there is one, else the CPU) or any torch device string.
    Raises ValueError or TypeError on a wrong value, and on a parameter that papermill was given under a name that the lesson does not know.
    """
    if _current["lesson"] != lesson:
        _refuse_unknown(sys._getframe(1).f_globals)
    if not isinstance(QUICK, bool):
        raise TypeError(f"QUICK is True or False, not {QUICK!r}")
    if isinstance(SEED, bool) or not isinstance(SEED, int):
        raise TypeError(f"SEED is a whole number, not {SEED!r}")
    if not 0 <= SEED < 2**63:
        raise ValueError(f"SEED lies between 0 and 2**63 - 1, not at {SEED}")

    import torch

    device = _device(DEVICE, torch)
    torch.manual_seed(SEED)
    _current["lesson"] = lesson

    from course_utils.engine.display import card
    from course_utils.engine.progress import of_lesson

    (solved, total), (right, made) = of_lesson(lesson)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    card(
        "note",
        f"{lesson} · {device} ({where}) · torch {torch.__version__} · Python {platform.python_version()} · "
        f"seed {SEED} · {'quick' if QUICK else 'full'} sizes",
        [("text", f"{solved} of {total} exercises solved, {right} of {made} predictions right")],
    )
    return Lesson(lesson, device, SEED, QUICK)


def current_lesson():
    """The lesson that this kernel has started, for what it records."""
    return _current["lesson"] or "unknown"


def _device(name, torch):
    if name == "auto":
        name = os.environ.get("DEVICE") or "auto"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"DEVICE={name!r} cannot be used here: {str(error).splitlines()[0][:200]}") from None
    return device


def _refuse_unknown(names):
    """papermill only warns about a parameter that the notebook does not have: SED=3 would silently leave SEED at 0."""
    for name, value in list(names.items()):
        if name in PARAMETERS or name.startswith("_") or not isinstance(value, (str, int, float, type(None))):
            continue
        close = difflib.get_close_matches(name.upper(), PARAMETERS, 1, 0.6)
        if close or name.isupper():
            meant = f"; did you mean {close[0]}?" if close else "."
            raise ValueError(f"unknown parameter {name}{meant} A lesson takes {', '.join(PARAMETERS)}.")
