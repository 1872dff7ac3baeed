# SPDX-License-Identifier: Apache-2.0
"""The kinds of fault that every run of the CI tries, each with the tests that do.

``pytest --each-fault`` runs at least one test of each kind, whatever else its samples
leave out (``sampling.py``). All tests of a kind are run by the same call of pytest, so
that one of them runs in each CI.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FAULTS"]

FAULTS: Mapping[str, tuple[str, ...]] = {
    # Ranks that end.
    "a rank is killed in a call": (
        "faults/test_deaths.py::test_every_wait_names_a_rank_that_was_killed",
        "faults/test_deaths_ulfm.py::test_every_wait_names_a_rank_that_was_killed",
        "faults/test_faults_on_purpose.py::"
        "test_the_others_of_a_killed_rank_name_it_and_go_on",
    ),
    "the others go on": (
        "faults/test_recovery_of_ranks.py::test_the_others_go_on",
        "faults/test_deaths_ulfm.py::test_the_others_go_on",
        "faults/test_elastic.py::test_a_fresh_world_gets_the_same_bits",
        "faults/test_chaos_campaign.py::test_ranks_are_killed_at_random_moments",
    ),
    "two ranks die, one of them in shrink": (
        "faults/test_recovery_of_ranks.py::test_another_dies_while_they_shrink",
        "faults/test_deaths_ulfm.py::test_a_death_during_shrink",
    ),
    "a rank dies while the others compute": (
        "faults/test_deaths.py::test_others_go_on_without_the_rank",
        "faults/test_deaths.py::test_what_was_sent_before_arrives",
    ),
    "a rank ends early, with status 0": (
        "faults/test_missing_ranks.py::test_a_rank_that_left_early_is_named",
        "faults/test_deaths.py::test_a_rank_that_ends_by_itself_is_named",
        "faults/test_recovery_of_ranks.py::test_a_rank_that_leaves_is_left_out",
    ),
    "an uncaught exception on one rank": (
        "faults/test_end_of_ranks.py::test_uncaught_exception_ends_the_job",
        "faults/test_dumps_of_processes.py::"
        "test_an_exception_leaves_a_dump_before_it_ends_the_job",
    ),
    "a rank is stopped, or very slow": (
        "faults/test_deaths.py::test_a_stopped_rank_is_late_and_not_dead",
        "faults/test_missing_ranks.py::test_a_stopped_rank_is_named_and_may_come_back",
        "faults/test_stopped_processes.py::"
        "test_the_others_name_a_stopped_rank_as_stopped",
        "faults/test_faults_on_purpose.py::test_a_stopped_rank_is_late_and_not_dead",
    ),
    "a rank is late, after a timeout": (
        "ranks/group/test_recovery.py::"
        "test_a_timeout_with_nobody_dead_is_recovered_from",
        "ranks/group/test_requests.py::test_timeout_of_a_request_leaves_it_waitable",
    ),
    # Ranks that disagree.
    "another operation": (
        "ranks/calls/test_check_mode.py::test_every_rank_raises_the_same[operation-",
        "ranks/calls/test_same_mismatch.py::test_all_ranks_raise_the_same[operation-",
    ),
    "another length": (
        "ranks/calls/test_check_mode.py::test_every_rank_raises_the_same[count-",
        "ranks/group/test_stepped.py::test_lengths_that_differ_are_found_by_the_engine",
    ),
    "another element type": (
        "ranks/calls/test_check_mode.py::test_every_rank_raises_the_same[dtype-",
        "ranks/calls/test_same_mismatch.py::test_all_ranks_raise_the_same[type-",
        "ranks/messages/test_types_of_messages.py::"
        "test_a_message_of_another_type_is_refused_where_it_comes",
    ),
    "another reduction": (
        "ranks/calls/test_check_mode.py::test_every_rank_raises_the_same[reduction-",
        "ranks/calls/test_same_mismatch.py::test_all_ranks_raise_the_same[reduction-",
    ),
    "another root": (
        "ranks/calls/test_check_mode.py::test_every_rank_raises_the_same[root-",
        "ranks/calls/test_same_mismatch.py::"
        "test_all_ranks_raise_the_same[root of a bcast-",
        "ranks/calls/test_same_mismatch.py::"
        "test_all_ranks_raise_the_same[root of a gather-",
    ),
    "another order": (
        "ranks/calls/test_check_mode.py::test_swapped_order_is_told_by_names",
        "ranks/calls/test_same_mismatch.py::test_all_ranks_raise_the_same[order-",
    ),
    "a call that one rank leaves out": (
        "ranks/calls/test_check_mode.py::test_a_skipped_operation_is_found_at_the_next",
    ),
    "counts of a vector operation that do not fit": (
        "ranks/calls/test_wrong_counts.py::test_check_mode_names_counts_that_differ",
        "ranks/calls/test_wrong_counts.py::"
        "test_without_check_mode_a_message_tells_that_counts_differ",
    ),
    # Launches that disagree.
    "ranks with other tables or settings": (
        "mpi/test_launchers_mpi.py::"
        "test_variables_that_differ_are_the_same_error_everywhere",
        "mpi/test_tables_mpi.py::test_ranks_with_different_tables_use_the_one_of_rank_0",
    ),
    "ranks with other versions": (
        "unit/job/test_versions_of_ranks.py::test_ranks_of_two_versions_are_refused",
    ),
    "the launcher of another MPI": (
        "unit/launch/test_launch.py::test_mixed_launchers_are_an_error_with_the_cure",
    ),
    # Data and arguments.
    "NaN and infinity": (
        "ranks/calls/test_nan_check.py::"
        "test_it_names_rank_operation_and_index_and_the_others_hear_of_it",
        "ranks/calls/test_operations.py::test_nan_wins_on_every_rank",
    ),
    "arrays that cannot be communicated": (
        "ranks/calls/test_bad_input.py::test_refused_before_anything_is_sent",
        "ranks/calls/test_awkward_arguments.py::"
        "test_awkward_arguments_of_communicators",
    ),
    "an input that overlaps the output": (
        "unit/calls/test_calls.py::test_blocks_of_other_ranks_are_overlaps",
    ),
    "a request that is dropped": (
        "ranks/group/test_requests.py::"
        "test_dropped_request_warns_and_its_buffers_outlive_it",
    ),
    "an array that is written while in flight": (
        "ranks/calls/test_changed_in_flight.py::test_a_write_is_found_and_named",
    ),
    "waits twice, uses after free, truth of a request": (
        "ranks/group/test_requests.py::test_wait_returns_the_same_output_every_time",
        "ranks/group/test_requests.py::test_truth_of_a_request_is_refused",
        "ranks/calls/test_bad_input.py::test_a_freed_communicator_says_so_everywhere",
    ),
    "threads that share a communicator": (
        "ranks/calls/test_check_mode.py::"
        "test_two_threads_at_once_on_one_communicator_are_told_so",
        "ranks/group/test_communicators.py::"
        "test_threads_may_share_a_communicator_where_order_does_not_matter",
    ),
    # Processes that are ended or started.
    "Ctrl-C in a wait": (
        "faults/test_ctrl_c.py::test_every_call_that_waits_ends_by_ctrl_c",
        "faults/test_ctrl_c.py::test_init_ends_by_ctrl_c",
        "faults/test_end_of_ranks.py::test_ctrl_c_interrupts_a_wait_and_nothing_is_lost",
    ),
    "SIGTERM": (
        "faults/test_dumps_of_processes.py::test_sigterm_ends_the_job_with_143",
        "faults/test_dumps_of_processes.py::"
        "test_a_signal_leaves_a_dump_and_ends_the_rank_as_ever",
    ),
    "fork and multiprocessing": (
        "faults/test_fork.py::test_a_forked_child_may_end_normally",
        "faults/test_fork.py::test_forked_workers_leave_the_parent_alone",
        "faults/test_children_of_ranks.py::test_a_child_after_init_is_a_world_of_one",
    ),
    "an exit with operations in flight": (
        "faults/test_end_of_ranks.py::"
        "test_exit_with_an_operation_that_never_ends_does_not_hang",
        "faults/test_end_of_ranks.py::test_a_rank_that_ends_first_does_its_part",
    ),
    # Memory.
    "no memory on one rank": (
        "faults/test_no_memory.py::test_all_ranks_hear_of_one_without_memory_and_go_on",
        "faults/test_no_memory.py::test_a_call_without_memory_leaves_nothing_behind",
    ),
    "/dev/shm is full": (
        "unit/job/test_arena.py::test_a_full_dev_shm_is_an_error_on_every_member",
    ),
    "memory that a killed rank leaves": (
        "faults/test_end_of_ranks.py::"
        "test_killed_rank_ends_the_job_and_leaves_no_shared_memory",
    ),
    "the launcher is killed": (
        "unit/package/test_run.py::test_no_rank_outlives_a_launcher_that_is_killed",
    ),
    # Tables, backends, files.
    "a malformed table": (
        "unit/select/test_table.py::test_what_is_wrong_is_named_with_its_place",
    ),
    "a hostile table": (
        "unit/select/test_table.py::"
        "test_hostile_text_is_refused_quickly_and_in_few_words",
        "unit/select/test_table.py::"
        "test_ten_megabytes_and_things_that_are_no_files_are_refused",
    ),
    "a table of another machine": (
        "unit/select/test_table.py::test_a_foreign_table_is_refused_unless_allowed",
    ),
    "a rule that cannot run here": (
        "unit/select/test_select_policy.py::"
        "test_a_rule_that_cannot_run_here_falls_back_and_says_so",
    ),
    "a backend that is missing": (
        "unit/bootstrap/test_bootstrap.py::test_a_missing_library_names_the_extra",
        "unit/bootstrap/test_bootstrap.py::test_mpi4py_without_an_mpi_names_the_extra",
    ),
    "a backend that fails": (
        "ranks/engine/test_injected_faults.py::"
        "test_a_failure_is_a_backend_error_there_and_ends_the_others",
        "ranks/engine/test_injected_faults.py::"
        "test_a_lost_operation_ends_by_the_deadline_of_all",
    ),
    "a bit that flips on its way": (
        "ranks/engine/test_checksums.py::test_a_flipped_bit_is_found_on_all_ranks",
        "ranks/engine/test_checksums.py::test_a_flipped_bit_of_a_message_is_found",
    ),
    "clocks that jump, and processes that do not run": (
        "faults/test_stopped_processes.py::"
        "test_what_came_while_a_rank_was_stopped_is_no_timeout",
        "faults/test_stopped_processes.py::"
        "test_a_rank_that_was_stopped_says_so_where_it_waits_in_vain",
    ),
    "a full disk": (
        "faults/test_full_disks.py::test_a_log_that_finds_no_room_ends_nothing",
        "faults/test_full_disks.py::"
        "test_a_dump_that_finds_no_room_leaves_the_error_as_it_is",
    ),
    "a wrong variable": (
        "unit/package/test_env.py::test_bad_value_names_variable_value_and_what_is_allowed",
        "unit/package/test_env.py::test_unknown_name_suggests_the_nearest",
    ),
}
"""By kind: test functions, or how the ids of their cases begin, from ``tests/``."""
