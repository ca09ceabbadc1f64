"""Measures of forgetting, against numbers worked out by hand."""

import math

import numpy as np
import pytest
import torch

from fedemu.algorithms.measures.forgetting import (
    accuracy_lost,
    agreement,
    diversity_of_norms,
    forgetting,
    gradient_diversity,
    in_local,
    local_forgetting,
    mean_local_forgetting,
    out_local,
    over_distribution,
    prediction_consistency,
    preferred_classes,
    round_forgetting,
    weight_alignment,
    weight_divergence,
)

ACCURACY = np.array(
    [
        [0.50, 0.25, 0.00],
        [0.75, 0.00, 0.25],
        [0.25, 0.50, 0.25],
    ]
)


def test_forgetting_is_the_mean_over_classes_of_the_best_earlier_accuracy_minus_the_last():
    assert forgetting(ACCURACY) == pytest.approx(((0.75 - 0.25) + (0.25 - 0.50) + (0.25 - 0.25)) / 3)


def test_forgetting_is_negative_if_the_last_round_is_the_best_of_every_class():
    assert forgetting([[0.25, 0.5], [0.5, 0.75]]) == -0.25


def test_forgetting_of_one_round_is_not_a_number():
    assert math.isnan(forgetting([[0.5, 0.5]]))


def test_a_class_without_test_samples_takes_no_part_in_forgetting():
    with_hole = np.column_stack([ACCURACY, [np.nan] * 3])
    assert forgetting(with_hole) == forgetting(ACCURACY)
    assert round_forgetting(with_hole).tolist() == round_forgetting(ACCURACY).tolist()
    with_hole[1, 3] = 0.5
    assert forgetting(with_hole) == forgetting(ACCURACY)


def test_round_forgetting_counts_losses_and_no_gains():
    assert round_forgetting(ACCURACY) == pytest.approx([0.25 / 3, 0.50 / 3])


def test_round_forgetting_of_a_run_that_only_improves_is_zero_without_a_sign():
    values = round_forgetting([[0.0, 0.5], [0.5, 0.5]])
    assert values.tolist() == [0.0]
    assert not np.signbit(values[0])


def test_round_forgetting_of_one_round_is_empty():
    assert round_forgetting([[0.5, 0.5]]).shape == (0,)


def test_forgetting_is_not_a_number_if_no_class_has_test_samples():
    nothing = np.full((3, 2), np.nan)
    assert math.isnan(forgetting(nothing))
    assert np.isnan(round_forgetting(nothing)).tolist() == [True, True]


def test_local_forgetting_is_the_loss_of_device_j_on_the_data_of_device_k():
    lost = local_forgetting([0.75, 0.5], [[1.0, 0.25], [0.5, 0.75]])
    assert lost.tolist() == [[-0.25, 0.25], [0.25, -0.25]]


def test_mean_local_forgetting_leaves_out_a_devices_own_data():
    lost = [[-0.25, 0.25, 0.75], [0.5, -1.0, 0.0], [0.25, 0.25, 9.0]]
    assert mean_local_forgetting(lost).tolist() == [0.5, 0.25, 0.25]


def test_a_single_device_has_no_others_to_forget():
    assert np.isnan(mean_local_forgetting([[0.5]])).tolist() == [True]


def test_equal_gradients_have_diversity_one():
    assert gradient_diversity([[3.0, 4.0], [3.0, 4.0]]) == 1.0


def test_orthogonal_gradients_of_one_length_have_diversity_two():
    assert gradient_diversity([[1.0, 0.0], [0.0, 1.0]]) == 2.0


def test_gradients_that_cancel_have_infinite_diversity():
    assert gradient_diversity([[1.0, 0.0], [-1.0, 0.0]]) == math.inf


def test_weight_divergence_is_the_euclidean_distance_over_all_leaves():
    params = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([2.0])}
    reference = {"bias": torch.tensor([4.0]), "weight": torch.tensor([[2.0, 0.0]])}
    assert weight_divergence(params, reference) == 3.0


def test_weight_divergence_takes_tensors_that_need_gradients_and_bfloat16():
    params = {"weight": torch.tensor([3.0, 4.0], dtype=torch.bfloat16, requires_grad=True)}
    assert weight_divergence(params, {"weight": np.zeros(2)}) == 5.0


def test_models_with_other_leaves_have_no_divergence():
    with pytest.raises(ValueError, match="bias"):
        weight_divergence({"bias": np.zeros(1)}, {})


def test_weight_alignment_is_the_share_of_neurons_that_prefer_the_same_class():
    labels = [0, 0, 7, 7, 7]
    # Mean activations per class: first model neurons prefer 0, 7, 7, 0; second 0, 7, 0, 7.
    first = np.array([[3, 0, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1], [5, 0, 1, 1]], dtype=float)
    second = np.array([[1, 0, 2, 0], [0, 0, 0, 0], [0, 5, 0, 1], [0, 0, 1, 0], [1, 0, 1, 1]], dtype=float)
    assert weight_alignment(first, second, labels) == 0.5


def test_weight_alignment_averages_over_positions_of_a_feature_map():
    labels = torch.tensor([0, 1])
    first = torch.zeros(2, 1, 2, 2)
    first[0, 0] = torch.tensor([[0.0, 0.0], [0.0, 3.0]])
    first[1, 0] = 0.5
    assert weight_alignment(first, torch.tensor([[1.0], [0.0]]), labels) == 1.0


def test_a_neuron_that_prefers_no_class_counts_for_the_lowest_class():
    assert weight_alignment([[0.0], [0.0]], [[1.0], [0.0]], [0, 1]) == 1.0


def test_a_class_without_samples_is_preferred_by_no_neuron():
    assert preferred_classes([[np.nan, np.nan], [-1.0, 2.0], [-3.0, 4.0]]).tolist() == [1, 2]
    assert agreement([1, 2, 0, 0], [1, 0, 0, 3]) == 0.5


def test_consistency_is_the_cosine_of_the_accuracies_by_class():
    assert prediction_consistency([0.6, 0.8], [0.8, 0.6]) == pytest.approx(0.96)
    assert prediction_consistency([0.3, 0.4], [0.6, 0.3]) == pytest.approx(0.3 / math.sqrt(0.25 * 0.45))
    assert prediction_consistency([0.1, 0.7], [0.1, 0.7]) <= 1.0  # by rounding it would be more
    assert prediction_consistency([1.0, 0.0, np.nan], [0.0, 1.0, 1.0]) == 0.0
    assert np.isnan(prediction_consistency([0.0, 0.0], [0.5, 0.5]))


def test_accuracy_lost_is_the_mean_over_classes_and_gains_do_not_make_up_for_losses():
    lost = accuracy_lost([0.5, 0.5, 0.5, 0.5], [[0.25, 1.0, 0.5, 0.0], [0.5, 0.5, 0.5, 0.5]])
    assert lost.tolist() == [0.1875, 0.0]


def test_accuracy_lost_takes_many_models_before_one_after():
    assert accuracy_lost([[1.0, 0.0], [0.0, 1.0]], [0.5, 0.25]).tolist() == [0.25, 0.375]


def test_a_class_without_test_samples_takes_no_part_in_what_was_lost():
    assert accuracy_lost([0.5, np.nan], [0.25, np.nan]) == 0.25
    assert np.isnan(accuracy_lost([np.nan], [np.nan]))


def test_in_local_and_out_local_distributions_add_up_to_one_and_weigh_classes_against_each_other():
    counts = [[4, 0, 12], [1, 1, 1], [0, 0, 7]]
    assert in_local(counts).tolist() == [[0.25, 0.0, 0.75], [1 / 3, 1 / 3, 1 / 3], [0.0, 0.0, 1.0]]
    assert out_local(counts).tolist() == [[0.375, 0.5, 0.125], [pytest.approx(1 / 3)] * 3, [0.5, 0.5, 0.0]]


def test_a_device_without_samples_has_no_distribution():
    assert np.isnan(in_local([0, 0])).all()
    assert np.isnan(out_local([0, 0])).all()


def test_with_a_single_class_nothing_is_out_of_the_local_distribution():
    assert np.isnan(out_local([5])).all()


def test_a_distribution_weighs_what_is_known_by_class():
    by_class = [[1.0, 0.5, 0.0], [0.0, 1.0, 0.25]]
    assert over_distribution(by_class, [0.25, 0.25, 0.5]).tolist() == [0.375, 0.375]
    assert over_distribution([1.0, 0.5, 0.0], in_local([[4, 0, 12], [0, 8, 0]])).tolist() == [0.25, 0.5]


def test_a_class_without_test_samples_leaves_its_part_of_a_distribution_to_the_others():
    assert over_distribution([1.0, np.nan, 0.5], [0.25, 0.5, 0.25]) == 0.75
    assert np.isnan(over_distribution([np.nan, 1.0], [1.0, 0.0]))


def test_devices_without_test_data_take_no_part_in_mean_local_forgetting():
    assert mean_local_forgetting([[0.0, 0.5, np.nan], [0.25, 0.0, np.nan], [0.25, 0.75, np.nan]]).tolist() == [
        0.5,
        0.25,
        0.5,
    ]


def test_gradient_diversity_needs_norms_only():
    assert diversity_of_norms([1.0, 1.0], 0.5) == gradient_diversity([[1.0, 0.0], [0.0, 1.0]])
    assert diversity_of_norms([1.0, 1.0], 0.0) == math.inf
