# SPDX-License-Identifier: Apache-2.0
"""Programs that train on real data, as users would write them.

    torchrun --nproc-per-node 2 -m commrt.examples.cnn --check
    torchrun --nproc-per-node 2 -m commrt.examples.gpt_fsdp --check
    torchrun --nproc-per-node 2 -m commrt.examples.gpt_tensor_parallel --check

Nothing in them is commrt's but the backend's name: ``--backend gloo`` runs the same.
"""
