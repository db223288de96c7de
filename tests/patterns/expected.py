"""What comes of each pattern: the class that `measure` finds. ``different`` is what is silent still."""

from __future__ import annotations

from typing import Final

__all__ = ["EXPECTED", "PART"]

EXPECTED = {
    # vision
    "mixup_in_the_collate_function": "identical",
    "cutmix_with_a_numpy_generator_of_its_own": "refused",
    "stochastic_depth_with_a_linear_schedule": "identical",
    "layer_decay_with_adaptive_clipping": "identical",
    "average_of_the_model_after_each_batch": "refused",
    "pseudo_labels_in_eval_mode": "identical",
    "eval_mode_left_on_after_validation": "identical",
    "multi_scale_training_every_few_batches": "refused",
    "dataset_that_caches_augmented_images": "refused",
    "jitter_with_in_place_operators": "refused",
    "frozen_batch_norm_and_larger_images": "identical",
    "hard_examples_weigh_more": "refused",
    "features_memoised_in_memory": "refused",
    "features_memoised_in_files": "identical",
    # language
    "padding_to_the_longest_of_the_batch": "identical",
    "adapters_that_are_merged_at_the_end": "identical",
    "weights_tied_after_tracking": "identical",
    "embeddings_resized_for_new_tokens": "identical",
    "hidden_state_carried_from_batch_to_batch": "refused",
    "truncated_backpropagation_within_a_batch": "identical",
    "batches_with_loss_spikes_weigh_less": "refused",
    "gradient_accumulation_by_hand": "refused",
    "learning_rate_by_tokens_seen": "refused",
    "vocabulary_that_grows_in_the_collate_function": "refused",
    # Without `unisono run`, Python orders a set of strings anew in each process.
    "vocabulary_from_a_set": "different",
    "word_dropout_with_a_generator_of_its_own": "refused",
    "temperature_clamped_in_forward": "refused",
    # generative
    "generator_and_discriminator_in_turn": "identical",
    "gradient_penalty_and_both_losses": "identical",
    "the_loop_of_the_dcgan_tutorial": "refused",
    "spectral_norm_of_both_kinds": "identical",
    "pool_of_past_fakes": "refused",
    "annealing_by_a_counter_in_forward": "refused",
    "timesteps_sampled_by_their_losses": "refused",
    "adaptive_discriminator_augmentation": "refused",
    "progressive_growing": "identical",
    "latents_from_a_shared_bank": "refused",
    # reinforcement
    "moving_baseline_of_reinforce": "refused",
    "baseline_from_the_loss_of_the_step": "identical",
    "target_network_copied_every_other_step": "identical",
    "soft_update_in_the_loss_function": "refused",
    "replay_buffer_filled_in_the_loop": "refused",
    # The counter decides on few samples, and on none of those that two workers compute.
    "exploration_that_falls_with_a_global_counter": "different",
    "rewards_normalised_by_running_statistics": "refused",
    "stopping_a_ppo_epoch_when_the_policy_moved_too_far": "refused",
    "coefficient_adapted_by_the_last_divergence": "refused",
    "rollouts_collected_between_the_steps": "identical",
    # graphs and audio
    "random_edges_are_dropped": "identical",
    "neighbours_sampled_by_a_generator_of_the_module": "refused",
    "embeddings_of_earlier_batches": "refused",
    "label_propagation_between_the_steps": "identical",
    "positions_with_random_signs_in_an_lru_cache": "refused",
    "spec_augment_and_running_normalisation": "identical",
    "streaming_convolution_with_a_left_context": "identical",
    "background_noise_from_a_second_loader": "refused",
    "pieces_cut_at_lengths_that_grow": "identical",
    # selfsupervised
    "moco_as_published": "refused",
    "queue_of_negatives_in_a_list": "refused",
    "target_encoder_that_follows_after_each_step": "identical",
    "centre_of_the_teacher_in_a_tracked_loss": "identical",
    "centre_of_the_teacher_in_a_loss_that_is_not_tracked": "refused",
    "codebook_with_moving_averages": "identical",
    "prototypes_normalised_before_each_batch": "refused",
    "mean_teacher_hidden_in_the_model": "refused",
    "memory_bank_of_features": "refused",
    "statistics_of_activations_for_the_screen": "identical",
    # tricks
    "sharpness_aware_minimisation": "refused",
    "sharpness_aware_by_the_gradient_before": "identical",
    "average_of_the_last_epoch_with_its_own_statistics": "identical",
    "lookahead_every_third_step": "identical",
    "pruning_in_the_middle": "identical",
    "quantisation_aware_training": "refused",
    "dynamic_weight_average_of_two_tasks": "refused",
    "uncertainty_weights_and_parametrizations": "identical",
    "plateau_of_the_last_batch_loss": "refused",
    "plateau_of_the_step_loss_and_early_stopping": "identical",
    "clipping_after_each_backward": "identical",
    "gradients_set_to_none_before_each_backward": "identical",
    "gradient_noise_and_centralisation": "identical",
    "maml_with_functional_call": "identical",
    "first_order_maml_with_a_copy": "identical",
    "buffer_registered_anew_in_forward": "identical",
    "learning_rate_by_the_time_that_is_left": "refused",
    "validation_on_the_shard_of_the_worker": "refused",
    "samples_drawn_by_the_main_worker": "refused",
    "curriculum_by_losses_of_the_batches": "refused",
    "compiled_model_under_autocast": "identical",
    "unfreezing_one_layer_after_the_other": "identical",
    "standardised_weights_with_a_cache": "identical",
    "learning_rate_set_by_the_loss_of_a_batch": "refused",
    "early_stopping_decided_by_the_main_worker": "refused",
    "running_mean_in_a_file": "refused",
}

PART: Final = frozenset(
    {
        # vision
        "layer_decay_with_adaptive_clipping",
        "multi_scale_training_every_few_batches",
        "dataset_that_caches_augmented_images",
        "frozen_batch_norm_and_larger_images",
        # language
        "padding_to_the_longest_of_the_batch",
        "hidden_state_carried_from_batch_to_batch",
        "gradient_accumulation_by_hand",
        "vocabulary_from_a_set",
        "temperature_clamped_in_forward",
        # generative
        "generator_and_discriminator_in_turn",
        "gradient_penalty_and_both_losses",
        "pool_of_past_fakes",
        "timesteps_sampled_by_their_losses",
        # reinforcement
        "target_network_copied_every_other_step",
        "exploration_that_falls_with_a_global_counter",
        "replay_buffer_filled_in_the_loop",
        "rollouts_collected_between_the_steps",
        # graphs and audio
        "label_propagation_between_the_steps",
        "positions_with_random_signs_in_an_lru_cache",
        "spec_augment_and_running_normalisation",
        "background_noise_from_a_second_loader",
        # selfsupervised
        "moco_as_published",
        "target_encoder_that_follows_after_each_step",
        "centre_of_the_teacher_in_a_tracked_loss",
        "mean_teacher_hidden_in_the_model",
        # tricks
        "sharpness_aware_minimisation",
        "lookahead_every_third_step",
        "plateau_of_the_step_loss_and_early_stopping",
        "maml_with_functional_call",
        "samples_drawn_by_the_main_worker",
        "unfreezing_one_layer_after_the_other",
        "running_mean_in_a_file",
    }
)
"""What `make test-more` runs: of each file some that give the same bits and some that do not."""
