"""Measures of continual learning, against numbers worked out by hand and against Avalanche's definitions."""

import math

import numpy as np
import pytest

from fedemu.algorithms.measures.continual import (
    average_accuracy,
    average_forgetting,
    average_incremental_accuracy,
    backward_transfer,
    forgetting_factor,
    forward_transfer,
    perplexity,
    relative_change,
    relative_forgetting,
)

NAN = math.nan
ACCURACY = np.array(
    [
        [0.8, 0.2, 0.1],
        [0.9, 0.7, 0.3],
        [0.5, 0.6, 0.6],
    ]
)
UNTRAINED = [0.1, 0.15, 0.05]


def avalanche_forgetting(matrix: np.ndarray) -> list[float]:
    """Forgetting as Avalanche records it: the accuracy just after training on an experience, minus the last one."""
    initial, last = {}, {}
    for trained, row in enumerate(matrix):
        last = {}
        for evaluated, accuracy in enumerate(row):
            (initial if evaluated == trained else last)[evaluated] = accuracy
    return [initial[key] - last[key] for key in sorted(initial.keys() & last.keys())]


def avalanche_forward_transfer(matrix: np.ndarray, untrained: list[float]) -> list[float]:
    """Forward transfer as Avalanche records it: the accuracy after the experience before, minus the initial one."""
    return [
        accuracy - untrained[evaluated]
        for trained, row in enumerate(matrix)
        for evaluated, accuracy in enumerate(row)
        if trained == evaluated - 1
    ]


def avalanche_stream_accuracy(latest: np.ndarray, examples: list[int]) -> float:
    """Stream accuracy as Avalanche records it: a running mean over all samples of the stream."""
    hits = sum(round(accuracy * count) for accuracy, count in zip(latest, examples, strict=True))
    return hits / sum(examples)


def test_average_accuracy_is_the_mean_of_the_last_row():
    assert average_accuracy(ACCURACY) == pytest.approx((0.5 + 0.6 + 0.6) / 3)


def test_average_accuracy_of_a_run_that_goes_on_is_over_the_periods_seen():
    assert average_accuracy(ACCURACY[:2]) == pytest.approx((0.9 + 0.7) / 2)


def test_with_numbers_of_samples_average_accuracy_is_avalanches_stream_accuracy():
    assert average_accuracy(ACCURACY, examples=[1, 3, 0]) == pytest.approx((0.5 * 1 + 0.6 * 3) / 4)


def test_with_test_sets_of_one_size_average_accuracy_is_avalanches_stream_accuracy():
    sizes = [10, 10, 10]
    assert average_accuracy(ACCURACY) == pytest.approx(avalanche_stream_accuracy(ACCURACY[-1], sizes))
    assert average_accuracy(ACCURACY, [10, 30, 20]) == pytest.approx(
        avalanche_stream_accuracy(ACCURACY[-1], [10, 30, 20])
    )


def test_average_incremental_accuracy_is_the_mean_of_each_models_accuracy_on_all_that_it_had_seen():
    # Table 5 of MFCL, its last row, in percent.
    ours = [71.50, 55.00, 50.73, 45.73, 42.38, 40.62, 38.97, 36.18, 35.47, 33.25]
    assert round(average_incremental_accuracy(ours), 2) == 44.98
    assert average_incremental_accuracy([0.5, NAN, 1.0]) == 0.75
    assert math.isnan(average_incremental_accuracy([NAN]))


def test_the_forgetting_factor_is_the_best_earlier_model_minus_the_latest_on_every_test_set():
    assert forgetting_factor(ACCURACY) == pytest.approx([0.9 - 0.5, 0.7 - 0.6, 0.3 - 0.6])


def test_average_forgetting_leaves_out_the_latest_period():
    assert average_forgetting(ACCURACY) == pytest.approx((0.4 + 0.1) / 2)


def test_models_from_before_a_period_count_among_the_earlier_ones():
    assert average_forgetting([[0.9, 0.8, 0.0], [0.9, 0.5, 0.0], [0.9, 0.6, 0.0]]) == pytest.approx((0.0 + 0.2) / 2)


def test_average_forgetting_is_mfcls_except_for_a_period_on_which_the_last_model_is_best():
    def of_babakniya(matrix: np.ndarray) -> float:
        return float(np.mean((matrix.max(axis=0) - matrix[-1])[: len(matrix) - 1]))

    assert average_forgetting(ACCURACY) == pytest.approx(of_babakniya(ACCURACY))
    best_in_the_end = np.array([[0.5, 0.0], [0.75, 0.5]])
    assert (of_babakniya(best_in_the_end), average_forgetting(best_in_the_end)) == (0.0, -0.25)


def test_backward_transfer_is_against_the_model_that_has_just_learnt_the_period():
    assert backward_transfer(ACCURACY) == pytest.approx(((0.5 - 0.8) + (0.6 - 0.7)) / 2)


def test_forward_transfer_is_the_model_one_period_before_against_the_untrained_one():
    assert forward_transfer(ACCURACY, UNTRAINED) == pytest.approx(((0.2 - 0.15) + (0.3 - 0.05)) / 2)
    assert forward_transfer(ACCURACY[:2], UNTRAINED) == pytest.approx(0.2 - 0.15)  # the run goes on


def test_forward_transfer_is_avalanches():
    recorded = avalanche_forward_transfer(ACCURACY, UNTRAINED)
    assert recorded == pytest.approx([0.2 - 0.15, 0.3 - 0.05])
    assert forward_transfer(ACCURACY, UNTRAINED) == pytest.approx(np.mean(recorded))


def test_avalanches_forgetting_is_minus_backward_transfer():
    assert backward_transfer(ACCURACY) == pytest.approx(-np.mean(avalanche_forgetting(ACCURACY)))


def test_avalanches_forgetting_is_average_forgetting_if_each_period_is_best_just_after_it_was_learnt():
    matrix = np.array([[0.8, 0.2, 0.1], [0.7, 0.9, 0.3], [0.5, 0.6, 0.6]])
    assert avalanche_forgetting(matrix) == pytest.approx([0.8 - 0.5, 0.9 - 0.6])
    assert average_forgetting(matrix) == pytest.approx(np.mean(avalanche_forgetting(matrix)))


def test_a_single_period_has_an_accuracy_and_no_forgetting():
    assert average_accuracy([[0.5]]) == 0.5
    assert math.isnan(average_forgetting([[0.5]]))
    assert math.isnan(backward_transfer([[0.5]]))
    assert math.isnan(forward_transfer([[0.5]], [0.1]))
    assert np.isnan(forgetting_factor([[0.5]])).tolist() == [True]


def test_a_period_without_test_data_takes_no_part():
    matrix = ACCURACY.copy()
    matrix[:, 1] = NAN
    assert average_accuracy(matrix) == pytest.approx((0.5 + 0.6) / 2)
    assert average_forgetting(matrix) == pytest.approx(0.4)
    assert backward_transfer(matrix) == pytest.approx(0.5 - 0.8)
    assert forward_transfer(matrix, UNTRAINED) == pytest.approx(0.3 - 0.05)
    assert forgetting_factor(matrix) == pytest.approx([0.4, NAN, -0.3], nan_ok=True)


def test_a_model_that_was_not_evaluated_is_not_the_best():
    assert forgetting_factor([[NAN, 0.4], [0.5, NAN], [0.3, 0.1]]) == pytest.approx([0.2, 0.3])


def test_measures_are_not_a_number_if_nothing_is_known():
    assert math.isnan(average_accuracy(np.full((2, 2), NAN)))
    assert math.isnan(average_forgetting(np.full((2, 2), NAN)))


@pytest.mark.parametrize("wrong", [[0.5, 0.5], np.zeros((0, 3))])
def test_a_value_that_is_no_matrix_is_refused(wrong):
    with pytest.raises(ValueError, match=r"a matrix \[models, periods\] with at least one model is needed"):
        average_accuracy(wrong)


def test_perplexity_is_that_of_the_mean_log_likelihood_of_a_token():
    found = perplexity([-2 * math.log(8), -math.log(2), 0.0], [2, 1, 0])
    assert found == pytest.approx([8.0, 2.0, NAN], nan_ok=True)


def test_the_relative_change_in_perplexity_is_zero_for_the_run_without_replay_itself():
    assert relative_change([6.0, 8.0, NAN], [8.0, 8.0, 8.0]) == pytest.approx([-0.25, 0.0, NAN], nan_ok=True)


def test_forgetting_of_perplexity_is_relative_to_the_lowest_of_the_earlier_models():
    matrix = [[4.0, 20.0, 30.0], [5.0, 8.0, 20.0], [6.0, 6.0, NAN]]
    assert relative_forgetting(matrix) == pytest.approx([0.5, -0.25, NAN], nan_ok=True)
    assert np.isnan(relative_forgetting(matrix[:1])).all()


def test_forgetting_may_be_taken_of_relative_changes():
    changes = relative_change([[4.0, 20.0], [6.0, 6.0]], 8.0)
    assert forgetting_factor(changes, lower_is_better=True) == pytest.approx([2 / 8, -14 / 8])


def test_with_orders_of_their_own_a_task_counts_from_the_period_in_which_it_was_first_met():
    since = [1, 0, 2]
    assert average_accuracy(ACCURACY[:1], since=since) == 0.2
    assert average_accuracy(ACCURACY[:2], since=since) == pytest.approx((0.9 + 0.7) / 2)
    assert average_accuracy(ACCURACY[:2], [1, 3, 9], since=since) == pytest.approx((0.9 + 3 * 0.7) / 4)
    # Tasks 0 and 1 were met before the last period. Their bests are 0.9 and 0.7; just after they were met, 0.9 and 0.2.
    assert average_forgetting(ACCURACY, since) == pytest.approx((0.9 - 0.5 + 0.7 - 0.6) / 2)
    assert backward_transfer(ACCURACY, since) == pytest.approx((0.5 - 0.9 + 0.6 - 0.2) / 2)
    assert math.isnan(backward_transfer(ACCURACY[:1], since))
    assert average_forgetting(ACCURACY, [0, 0, 0]) == pytest.approx((0.4 + 0.1 - 0.3) / 3)
    for measure in (average_accuracy, average_forgetting, backward_transfer):
        assert measure(ACCURACY, since=[0, 1, 2]) == measure(ACCURACY)
