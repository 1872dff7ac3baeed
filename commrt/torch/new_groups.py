# SPDX-License-Identifier: Apache-2.0
"""What torch gets when it asks for a process group, or for a device's backend."""

from __future__ import annotations

from typing import Any

from commrt.torch import jobs
from commrt.torch.backend import CommrtBackend, backend_of, can_be_made
from commrt.torch.errors import wrong_call
from commrt.torch.group_options import Options
from commrt.torch.joined_group import JoinedGroup
from commrt.torch.process_group import CommrtProcessGroup, group_of
from commrt.torch.reconfigurable import reconfigurable_group
from commrt.torch.refused_by_torch import listen
from commrt.torch.tracing import follow_group
from commrt.torch.uncompiled import stay_uncompiled
from commrt.vocabulary.checks import check_flag
from commrt.vocabulary.limits import NO_LIMIT_S, as_timedelta, timedelta_seconds

__all__ = ["make_process_group"]


def make_process_group(
    options: Any, pg_options: Any, *, of_all_devices: bool = True
) -> CommrtProcessGroup | CommrtBackend:
    """Return the group that torch asks for; collective over its ranks.

    Where the program gives other devices other backends, it is one of the backends of a
    group that torch makes, if this torch lets Python make one. A group that can be
    reconfigured is connected later: there it is not collective.
    """
    stay_uncompiled()
    listen()
    if pg_options is not None and not isinstance(pg_options, Options):
        raise wrong_call(
            f"init_process_group or new_group: pg_options={pg_options!r}: expected "
            f"commrt.torch.Options, or None"
        )
    is_backend = can_be_made() and not of_all_devices
    limit_s = timedelta_seconds(options.timeout)
    if limit_s == NO_LIMIT_S:
        # torch has given the store the same limit, which it cannot count.
        options.store.set_timeout(as_timedelta(limit_s))
    member = jobs.Member(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        ranks=list(options.global_ranks_in_group),
        name=options.group_id,
        timeout_s=limit_s,
        options=pg_options or Options(),
        is_wrapped=is_backend,
    )
    if _is_reconfigurable(options, member.options):
        _check_reconfigurable(of_all_devices)
        group: CommrtProcessGroup = reconfigurable_group(member)
    elif is_backend:
        backend = backend_of(JoinedGroup(member))
        follow_group(backend)
        return backend
    else:
        group = group_of(JoinedGroup(member))
    # torch binds the device to a group that it drops for this one, and 2.13 does
    # not show that one.
    dropped = getattr(options, "process_group", None)
    if dropped is not None and dropped.bound_device_id is not None:
        group.bound_device_id = dropped.bound_device_id
    return group


def _is_reconfigurable(options: Any, own: Options) -> bool:
    what = "commrt.torch.Options"
    asked = check_flag(what, "enable_reconfigure", own.enable_reconfigure)
    return asked or bool(getattr(options, "enable_reconfigure", False))


def _check_reconfigurable(of_all_devices: bool) -> None:
    if not can_be_made():
        raise wrong_call(
            "enable_reconfigure=True: torch has reconfiguration from 2.14 on; with "
            "an older torch commrt.init() and comm.shrink() go on after a fault"
        )
    if not of_all_devices:
        raise wrong_call(
            "enable_reconfigure=True: torch reconfigures groups of one backend only, "
            "and commrt those that torch's hooks do not watch: use "
            "init_process_group('commrt') for all devices, and unset "
            "TORCH_DIST_NAN_CHECK"
        )
