"""DeepSpeed's folders: a training state, each process writing its part (ZeRO 0 to 3, universal).

    latest, latest_universal                           the name of the folder <tag>: global_step2
    <tag>/mp_rank_00_model_states.pt                   stages 0 to 2: the model of rank 0
    <tag>/zero_pp_rank_<r>_mp_rank_00_model_states.pt  stage 3: that of each rank
    <tag>/[bf16_]zero_pp_rank_<r>_mp_rank_00_optim_states.pt
                                                       stages 1 to 3: each rank's weights, optimizer
    <tag>/zero/<name>/fp32.pt, exp_avg.pt, exp_avg_sq.pt, step.pt
                                                       universal: one parameter, assembled
    <tag>/zero/optimizer_state.pt

All are files of torch.save. Other names (``mp_rank_01``, ``layer_*``, ``expert_*``) come from
model, pipeline and expert parallelism. What is in them:

    model_states   module           state_dict: in 16 bits if the run was; in stage 3 of empty
                                    tensors, buffers aside
                   buffer_names     names in module
                   param_shapes     [{name: torch.Size} for each group]; None in stage 0
                   frozen_param_shapes, frozen_param_fragments
                                    {name: torch.Size}, {name: tensor}, or None
                   shared_params    {name: name of the same parameter}
                   the arguments of save_checkpoint, and counters
    optim_states   optimizer_state_dict
        stages 1, 2    single_partition_of_fp32_groups [1-D tensor for each group],
                       group_paddings [int], param_alignment_paddings [[int]],
                       partition_count [int], base_optimizer_state
        stage 3        fp32_flat_groups [1-D tensor for each group], partition_count,
                       optimizer_state_dict
        the last are   {"state": {group: {"exp_avg": 1-D tensor, ..., "step"}}, "param_groups"},
                       or [state of group]
    fp32.pt ...    {"param": tensor, ...}, or the tensor; of stage 3 a flat one

Of W ranks, with c = ceil(elements / W):

- stages 1 and 2: the tensors of one group, joined over the ranks, are its parameters in order, each
  followed by as many elements as param_alignment_paddings says. Less than 2 W elements may follow.
- stage 3: the tensors of one rank, joined over the groups, hold c elements of each parameter in
  order; a parameter is its elements joined over the ranks, cut to its size. Frozen ones are
  fragments of the same kind, by name.

The optimizer's tensors are laid out in the same way, padded or not.
(deepspeed/utils/zero_to_fp32.py, runtime/zero/stage_1_and_2.py, stage3.py,
checkpoint/ds_to_universal.py of 0.19.8)

:mod:`places` finds the files, :mod:`states` reads them, :mod:`partitions` is the arithmetic above,
:mod:`ranks` and :mod:`universal` apply it, :mod:`module` assembles the state_dict, :mod:`reader` is
the format.
"""
