"""python -m course_utils: the course's commands. Standard library only; each command imports what it needs when the
environment is there."""
import argparse
import os
import re
import signal
import sys

from course_utils.engine import environment

PROGRAM = "python -m course_utils"


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}. `{self.prog} --help` tells what it takes.\n")


def lab(options):
    from course_utils.engine.lab import lab

    return lab(browser=options.browser, port=options.port)


def test(options):
    from course_utils.engine.suite import test

    environment.show_preflight()
    return test(quick=options.quick, device=options.device)


def run(options):
    from course_utils.engine.runs import run

    return run(options.lessons, solved=options.solved, device=options.device, full=options.full)


def progress(options):
    from course_utils.engine.progress import report

    return report(as_json=options.json)


def reset(options):
    from course_utils.engine.lab import reset

    return reset(options.lessons)


def build(options):
    from course_utils.engine.notebooks import build_command

    return build_command(options.lessons, check=options.check)


def grade(options):
    from course_utils.engine.grading import grade

    return grade(options.folder, as_json=options.json)


def port(text):
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port (1 to 65535)")
    return int(text)


def device(text):
    if not re.match(r"(auto|cpu|mps|cuda(:\d+)?)$", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device (auto, cpu, cuda, cuda:0, mps)")
    return text


def parser():
    parser = Parser(prog=PROGRAM, description="PyTorch, measured: an interactive course. Start with `lab`.")
    commands = parser.add_subparsers(metavar="COMMAND", dest="command")

    def command(function, summary, sets_up=False):
        made = commands.add_parser(function.__name__, help=summary, description=summary[0].upper() + summary[1:] + ".")
        made.set_defaults(function=function, latest=False, torch_index=None)
        if sets_up:
            made.add_argument("--latest", action="store_true",
                              help="set up the newest packages within the tested ranges, not the exact tested set")
            made.add_argument("--torch-index", metavar="URL",
                              help="take torch and torchvision from this package index, such as one of CPU-only builds")
        return made

    c = command(lab, "set up .venv if needed, check the machine, open JupyterLab on your copy of the lessons", True)
    c.add_argument("--no-browser", dest="browser", action="store_false", help="print the address, open nothing")
    c.add_argument("--port", type=port, help="the first port to try (8888)")

    c = command(test, "set up .venv if needed, run everything that CI runs", True)
    c.add_argument("--quick", action="store_true", help="leave out papermill and the browser, and say so")
    c.add_argument("--device", type=device, default="auto", help="auto, cpu, cuda")

    c = command(run, "run lessons as batch jobs, with a summary")
    c.add_argument("lessons", nargs="*", metavar="NN", help="lessons, such as 01; all of them if none is named")
    c.add_argument("--solved", action="store_true", help="with each exercise replaced by its solution")
    c.add_argument("--device", type=device, default="auto", help="auto, cpu, cuda")
    c.add_argument("--full", action="store_true", help="full sizes instead of the quick ones")

    c = command(progress, "tell what you have solved")
    c.add_argument("--json", action="store_true", help="for programs")

    c = command(reset, "give a fresh copy of a lesson; the old one is kept under a dated name")
    c.add_argument("lessons", nargs="+", metavar="NN", help="lessons, such as 01")

    c = command(build, "for maintainers: rebuild notebooks from their sources")
    c.add_argument("lessons", nargs="*", metavar="NN", help="lessons, such as 01; all of them if none is named")
    c.add_argument("--check", action="store_true", help="only tell which are stale")

    c = command(grade, "for teachers: check a folder of submissions, each in a process of its own")
    c.add_argument("folder", metavar="DIR")
    c.add_argument("--json", action="store_true", help="for programs")
    return parser


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else arguments
    for name in ("SIGTERM", "SIGHUP"):  # killed, or its terminal closed: an exit that lets every `finally` run
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), lambda number, _: sys.exit(128 + number))
    try:
        options = parser().parse_args(arguments)
        if options.command is None:
            parser().print_help()
            return 0
        environment.ensure(arguments, options.latest, options.torch_index)
        return options.function(options) or 0
    except environment.CourseError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `… | head` has read enough; nothing more can be printed, at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except OSError as error:  # a full disk, a folder that is not writable
        print(f"{PROGRAM} {options.command} stopped: {error.strerror}: {error.filename}.", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console that lacks a sign shows another, instead of an error
    sys.exit(main())
