"""How the exercises of lesson 05 try a dataset in workers: forked ones on Linux, deep copies elsewhere, and nothing left behind."""

import os
import signal
import threading
import time

import pytest
import torch
from exercise_answers import ANSWERS
from exercise_answers import lesson_05 as _answers  # noqa: F401, fills ANSWERS
from torch.utils.data import Dataset, get_worker_info

from course_utils.engine.exercises import Outcome, examine
from course_utils.exercises import lesson_05

IN_WORKERS = {e.name: e for e in lesson_05.EXERCISES if e.name in ("noisy_dataset", "count_stream", "read_rows")}
linux = pytest.mark.skipif(not lesson_05.FORKS, reason="a check forks on Linux alone")


class Counter(Dataset):
    started = 0

    def __len__(self):
        return 4

    def __getitem__(self, i):
        type(self).started += 1
        return i + type(self).started


def children():
    with open(f"/proc/self/task/{os.getpid()}/children") as file:
        return file.read().split()


@pytest.mark.parametrize("name", IN_WORKERS)
def test_where_nothing_forks_the_same_is_right_and_the_same_is_wrong(name, monkeypatch):
    monkeypatch.setattr(lesson_05, "FORKS", False)
    exercise = IN_WORKERS[name]
    assert examine(exercise, exercise.solution).outcome is Outcome.RIGHT
    for mistake in exercise.mistakes:
        assert mistake.says in examine(exercise, mistake.gives).text
    for function in ANSWERS[name]["right"]:
        assert examine(exercise, function).outcome is Outcome.RIGHT, function
    for function, words in ANSWERS[name]["wrong"]:
        if function.__name__ != "a_held_descriptor":  # a number, whose meaning only another process shows
            report = examine(exercise, function)
            assert report.outcome is not Outcome.RIGHT and words in report.text, report.text


@pytest.mark.parametrize("forks", [pytest.param(True, marks=linux), False])
def test_each_worker_has_a_copy_of_all_that_the_dataset_is(forks, monkeypatch):
    monkeypatch.setattr(lesson_05, "FORKS", forks)
    given, said = lesson_05.in_workers(Counter(), lambda dataset, number: [dataset[i] for i in range(2)], workers=3)
    assert said is None and given == [[1, 3]] * 3
    assert Counter.started == 0


@pytest.mark.parametrize("forks", [pytest.param(True, marks=linux), False])
def test_a_worker_has_its_seed_and_its_number_and_this_process_keeps_its_own(forks, monkeypatch):
    monkeypatch.setattr(lesson_05, "FORKS", forks)
    before = torch.random.get_rng_state()

    def act(dataset, number):
        info = get_worker_info()
        return info.id, info.num_workers, info.seed, torch.initial_seed()

    given, said = lesson_05.in_workers(Counter(), act, workers=2, base_seed=5 * 10**18)
    assert said is None and given == [(n, 2, 5 * 10**18 + n, 5 * 10**18 + n) for n in range(2)]
    assert get_worker_info() is None and torch.equal(before, torch.random.get_rng_state())


@linux
def test_a_worker_that_does_not_end_is_ended():
    before, begin = children(), time.monotonic()
    result, said = lesson_05._forked(lambda: time.sleep(60), seconds=0.3)
    assert result is None and "did not come back" in said
    assert time.monotonic() - begin < 20 and children() == before


@linux
@pytest.mark.parametrize("ends", [SystemExit, KeyboardInterrupt, None])
def test_a_worker_that_dies_is_told_of(ends):
    def work():
        if ends:
            raise ends
        os.kill(os.getpid(), signal.SIGKILL)

    before = children()
    assert "ended without a word" in lesson_05._forked(work)[1]
    assert children() == before


@linux
def test_it_works_in_a_thread_as_well():
    found = []
    thread = threading.Thread(target=lambda: found.append(lesson_05.in_workers(Counter(), lambda dataset, number: number)))
    thread.start()
    thread.join()
    assert found == [([0, 1], None)]
