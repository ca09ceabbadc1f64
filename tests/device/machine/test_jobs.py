"""The queue of jobs: which trainer runs which group, and what happens to jobs when a process dies."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from msgspec.structs import replace

from fedemu.device.bus import Submit
from fedemu.device.machine.jobs import HELD_SECONDS, Group, JobQueue, QueuedJob
from fedemu.protocol.ids import Digest
from fedemu.protocol.messages import BlobRef

MODEL = BlobRef(key="model", digest="a" * 64, size=10)


def a_job(device: int, ask: str = "1.0.0", origin: object = "p") -> QueuedJob:
    submit = Submit(
        device=device, ask=ask, program="train", task=0, shared=(MODEL,), own=None, next_own="next", tensors=()
    )
    return QueuedJob(submit, (), origin)


def a_queue(trainers: int = 1, capacity: int = 100, jobs: int = 0) -> JobQueue:
    queue = JobQueue(linger=1.0)
    for number in range(trainers):
        queue.add_trainer(number, {"train": capacity})
    for device in range(jobs):
        queue.submit(a_job(device), 0.0)
    return queue


def devices(groups: list[Group]) -> list[list[int]]:
    return [[job.submit.device for job in group.jobs] for group in groups]


def finish(queue: JobQueue, group: Group) -> None:
    for job in group.jobs:
        assert queue.answered(group.trainer, job.key) is job
    assert queue.finished(group.trainer, group.number) == []


def test_a_burst_is_one_group_once_it_is_over() -> None:
    queue = a_queue()
    queue.submit(a_job(0), 0.0)
    queue.submit(a_job(1), 0.5)
    assert queue.due() == 1.5
    assert queue.dispatch(1.4) == []
    assert devices(queue.dispatch(1.5)) == [[0, 1]]


def test_a_burst_that_never_ends_is_cut() -> None:
    queue = a_queue()
    for step in range(10):
        queue.submit(a_job(step), step * 0.9)
    assert queue.due() == 5.0


def test_idle_trainers_share_evenly_in_order_of_arrival() -> None:
    assert devices(a_queue(trainers=3, jobs=8).dispatch(1.0)) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_no_group_is_larger_than_a_trainer_takes() -> None:
    queue = a_queue(trainers=2, capacity=3, jobs=10)
    groups = queue.dispatch(1.0)
    assert devices(groups) == [[0, 1, 2], [3, 4, 5]]
    assert (queue.due(), queue.busy) == (None, [0, 1])
    finish(queue, groups[0])
    assert queue.busy == [1]
    assert devices(queue.dispatch(1.0)) == [[6, 7, 8]]


def test_jobs_that_wait_are_not_gone_through_for_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[QueuedJob] = []
    kind = QueuedJob.kind.fget

    def counted(job: QueuedJob) -> Hashable:
        asked.append(job)
        return kind(job)

    monkeypatch.setattr(QueuedJob, "kind", property(counted))
    queue = a_queue(capacity=1, jobs=100)
    for device in range(100):
        (group,) = queue.dispatch(1.0)
        assert devices([group]) == [[device]]
        finish(queue, group)
    assert len(asked) == 100


def test_jobs_of_different_asks_are_never_mixed() -> None:
    queue = a_queue(trainers=2)
    queue.submit(a_job(0, "1.0.0"), 0.0)
    queue.submit(a_job(1, "1.0.1"), 0.0)
    queue.submit(a_job(2, "1.0.0"), 0.0)
    assert devices(queue.dispatch(1.0)) == [[0], [2]]


def test_the_ask_whose_job_has_waited_longest_comes_first() -> None:
    queue = a_queue(capacity=1)
    for device, ask in enumerate(("1.0.0", "2.0.0", "1.0.0")):
        queue.submit(a_job(device, ask), 0.0)
    for device in range(3):
        (group,) = queue.dispatch(1.0)
        assert devices([group]) == [[device]]
        finish(queue, group)


def test_a_job_that_comes_while_others_wait_begins_when_its_turn_comes() -> None:
    queue = a_queue(capacity=1, jobs=2)
    groups = queue.dispatch(5.0)
    queue.submit(a_job(2), 6.0)
    for _ in range(2):
        finish(queue, groups[-1])
        groups += queue.dispatch(10.0)
    assert devices(groups) == [[0], [1], [2]]
    assert len({group.number for group in groups}) == 3, "the word of the end of one is not taken for that of another"


def test_a_job_that_comes_again_when_its_blobs_are_here_waits_no_more() -> None:
    queue = a_queue()
    queue.submit(a_job(0), 0.0, [Digest(MODEL.digest)])
    queue.submit(a_job(0), 1.0)
    assert devices(queue.dispatch(5.0)) == [[0]]


def test_a_job_waits_for_its_blobs_while_others_pass() -> None:
    queue = a_queue()
    queue.submit(a_job(0), 0.0, [Digest("a" * 64)])
    assert queue.due() is None
    queue.submit(a_job(1), 0.0)
    assert devices(queue.dispatch(1.0)) == [[1]]
    queue.arrived(Digest("a" * 64))
    queue.add_trainer(1, {"train": 100})
    assert devices(queue.dispatch(1.0)) == [[0]]


def test_a_job_whose_blob_cannot_be_had_is_returned() -> None:
    queue = a_queue()
    queue.submit(a_job(0), 0.0, [Digest("a" * 64)])
    queue.submit(a_job(1), 0.0)
    assert [job.key for job in queue.lost(Digest("a" * 64))] == [(0, "1.0.0")]
    assert devices(queue.dispatch(1.0)) == [[1]]
    assert len(queue) == 0


def test_a_withdrawn_job_is_not_run() -> None:
    queue = a_queue(capacity=1, jobs=4)
    queue.withdraw((0, "1.0.0"))
    queue.withdraw((9, "1.0.0"))
    (group,) = queue.dispatch(1.0)
    assert devices([group]) == [[1]]
    queue.withdraw((2, "1.0.0"))
    finish(queue, group)
    assert devices(queue.dispatch(1.0)) == [[3]]


def test_the_jobs_of_a_device_process_that_ended_are_dropped() -> None:
    queue = a_queue()
    queue.submit(a_job(0, origin="gone"), 0.0)
    queue.submit(a_job(1, origin="here"), 0.0)
    queue.abandon("gone")
    assert devices(queue.dispatch(1.0)) == [[1]]


def test_the_same_job_from_a_next_life_takes_over_the_answer_of_the_running_one() -> None:
    queue = a_queue()
    queue.submit(a_job(0, origin="first life"), 0.0)
    (group,) = queue.dispatch(1.0)
    queue.submit(a_job(0, origin="second life"), 2.0)
    assert len(queue) == 0
    job = queue.answered(group.trainer, (0, "1.0.0"))
    assert job is not None
    assert job.origin == "second life"


def test_another_job_of_the_same_name_leaves_the_running_one_without_a_listener() -> None:
    queue = a_queue(trainers=3)
    queue.submit(a_job(0), 0.0)
    (group,) = queue.dispatch(1.0)
    changed = a_job(0)
    changed.submit = replace(changed.submit, task=1)
    queue.submit(changed, 2.0)
    # Both write the same own state, so the second one waits for the end of the first, and others pass.
    assert queue.due() is None
    assert queue.dispatch(3.0) == []
    queue.submit(a_job(1), 2.0)
    assert devices(queue.dispatch(3.0)) == [[1]]
    old = queue.answered(group.trainer, (0, "1.0.0"))
    assert old is not None
    assert old.origin is None
    [second] = queue.dispatch(3.0)
    assert second.jobs == [changed]


def test_a_job_that_is_asked_for_again_replaces_the_one_that_waits_for_its_end() -> None:
    queue = a_queue(trainers=2)
    queue.submit(a_job(0), 0.0)
    (group,) = queue.dispatch(1.0)
    changed = a_job(0)
    changed.submit = replace(changed.submit, task=1)
    queue.submit(changed, 2.0)
    queue.submit(a_job(0, origin="next life"), 3.0)
    assert queue.remove_trainer(group.trainer, 4.0) == []
    (group,) = queue.dispatch(5.0)
    answered = queue.answered(group.trainer, (0, "1.0.0"))
    assert answered is not None
    assert answered.origin == "next life"
    # It would write another own state over that of the answer.
    assert queue.dispatch(9.0) == []
    assert len(queue) == 0


def test_a_job_with_other_samples_is_another_job_and_outlives_the_trainer_of_the_first() -> None:
    queue = a_queue(trainers=2)
    first, second = a_job(0), a_job(0)
    first.frames, second.frames = [b"one"], [memoryview(b"two")]
    queue.submit(first, 0.0)
    (group,) = queue.dispatch(1.0)
    queue.submit(second, 2.0)
    assert queue.remove_trainer(group.trainer, 2.0) == []
    [again] = queue.dispatch(3.0)
    assert again.jobs == [second]


def test_an_answer_that_nobody_asked_for_is_not_passed_on() -> None:
    queue = a_queue(jobs=1)
    (group,) = queue.dispatch(1.0)
    assert queue.answered(group.trainer, (5, "1.0.0")) is None
    assert queue.answered(3, (0, "1.0.0")) is None


def test_what_a_dead_trainer_had_not_answered_goes_to_the_head_of_the_queue() -> None:
    queue = a_queue(jobs=3)
    (group,) = queue.dispatch(1.0)
    queue.submit(a_job(7), 2.0)
    queue.answered(group.trainer, (1, "1.0.0"))
    assert queue.remove_trainer(8, 2.0) == [], "it died before it could take jobs"
    assert queue.remove_trainer(group.trainer, 2.0) == []
    queue.add_trainer(5, {"train": 100})
    assert devices(queue.dispatch(3.0)) == [[0, 2, 7]]


def test_a_job_that_kills_its_trainers_is_given_up_alone() -> None:
    queue = a_queue(jobs=3)
    for death in range(2):
        (group,) = queue.dispatch(10.0 * death + 1.0)
        assert queue.remove_trainer(group.trainer, 10.0 * death + 2.0) == []
        queue.add_trainer(death + 1, {"train": 100})
    (alone,) = queue.dispatch(100.0)
    assert devices([alone]) == [[0]]
    assert [job.key for job in queue.remove_trainer(alone.trainer, 100.0)] == [(0, "1.0.0")]
    queue.add_trainer(9, {"train": 100})
    (next_one,) = queue.dispatch(101.0)
    assert devices([next_one]) == [[1]]
    finish(queue, next_one)
    assert devices(queue.dispatch(101.0)) == [[2]]


def test_a_job_does_not_go_from_one_trainer_to_another_that_died_at_the_same_moment() -> None:
    queue = a_queue(jobs=1)
    for number in (1, 2):
        queue.add_trainer(number, {"train": 100})
    (group,) = queue.dispatch(10.0)
    dead = [group.trainer, *({0, 1, 2} - {group.trainer})]
    for after, number in enumerate(dead):
        now = 20.0 + 0.04 * after
        assert queue.remove_trainer(number, now) == []
        assert queue.dispatch(now) == []
    queue.add_trainer(3, {"train": 100})
    assert queue.due() == 20.0 + HELD_SECONDS
    assert queue.dispatch(20.09) == []
    (again,) = queue.dispatch(20.0 + HELD_SECONDS)
    assert (devices([again]), again.jobs[0].deaths) == ([[0]], 1)


def test_what_a_trainer_left_unanswered_comes_out_when_it_says_it_is_finished() -> None:
    queue = a_queue(jobs=2)
    (group,) = queue.dispatch(1.0)
    queue.answered(group.trainer, (0, "1.0.0"))
    changed = a_job(1)
    changed.submit = replace(changed.submit, task=1)
    queue.submit(changed, 2.0)
    assert queue.finished(group.trainer, group.number + 1) == queue.finished(8, group.number) == []
    assert [job.key for job in queue.finished(group.trainer, group.number)] == [(1, "1.0.0")]
    assert queue.finished(group.trainer, group.number) == []
    assert queue.idle == 1
    [behind] = queue.dispatch(3.0)
    assert behind.jobs == [changed], "what waited for its end begins"


def test_blobs_are_needed_as_long_as_a_job_is_queued_or_running() -> None:
    queue = a_queue(jobs=1)
    assert queue.needed() == {"a" * 64}
    (group,) = queue.dispatch(1.0)
    assert queue.needed() == {"a" * 64}
    finish(queue, group)
    assert queue.needed() == set()


def test_the_progress_of_a_trainer_changes_with_each_answer_and_with_each_group() -> None:
    queue = a_queue(capacity=2, jobs=3)
    assert queue.progress(0) is queue.progress(7) is None
    (group,) = queue.dispatch(1.0)
    seen = [queue.progress(0)]
    for job in group.jobs:
        queue.answered(0, job.key)
        seen.append(queue.progress(0))
    queue.finished(0, group.number)
    assert queue.progress(0) is None
    queue.dispatch(2.0)
    seen.append(queue.progress(0))
    assert len(set(seen)) == 4
