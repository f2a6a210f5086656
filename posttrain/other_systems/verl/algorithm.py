"""verl's keys of the algorithm, of data and of rewards."""

from __future__ import annotations

from posttrain.other_systems.verl.rule import Rule, not_needed, not_supported, translated

_CORRECTION = "algorithm.rollout_correction"
_TEXT = "prompts are text: images, videos and sounds are not read"

ALGORITHM: tuple[Rule, ...] = (
    translated(
        f"{_CORRECTION}.bypass_mode",
        "bypass",
        "`actor_rollout_ref.actor.old_log_probs`: `rollout`, or `trainer` if false",
    ),
    translated(
        f"{_CORRECTION}.loss_type",
        "loss_type",
        "in bypass mode `reinforce` is `actor_rollout_ref.actor.policy_loss.loss_mode=gpg`, times importance weights",
    ),
    translated(f"{_CORRECTION}.rollout_rs_threshold_lower", "lower", "`rollout_rs_threshold`: the pair low_high"),
    not_supported(
        f"{_CORRECTION}.rollout_token_veto_threshold",
        "one token's ratio does not reject its response",
        f"set {_CORRECTION}.rollout_rs=seq_max_k2 with a threshold, or remove it",
    ),
    not_supported(
        "algorithm.{use_pf_ppo,pf_ppo.*}",
        "PF-PPO's reweighting of samples is not built",
        "remove it",
        switch="algorithm.use_pf_ppo",
    ),
    not_needed(
        "algorithm.filter_groups.max_inflight_gen_batches", "further batches are generated when they are needed"
    ),
    not_supported(
        "distillation.*",
        "distillation from a teacher is not built",
        "remove it; a teacher's answers can be learnt by `posttrain sft`",
        switch="distillation.enabled",
    ),
)

DATA: tuple[Rule, ...] = (
    translated(
        "data.gen_batch_size",
        "gen_batch",
        "`data.train_batch_size` prompts are generated at a time: only the same number is "
        "accepted (with dynamic sampling any)",
    ),
    not_needed(
        "data.{return_raw_chat,return_raw_input_ids,return_full_prompt,return_multi_modal_inputs}",
        "batches always hold the messages; what nobody reads is not kept",
    ),
    not_needed(
        "data.{filter_overlong_prompts_workers,dataloader_num_workers}",
        "rows are read and tokenized in the run's process",
    ),
    not_needed("data.validation_shuffle", "the order of validation rows changes nothing"),
    not_supported(
        "data.reward_fn_key",
        "the column is data_source",
        "rename the column, or set data.data_source",
        off=("data_source",),
    ),
    not_supported("data.{image_key,video_key,audio_key}", _TEXT, "remove it if the rows have no such column", off=()),
    not_needed("data.{image_patch_size,mm_processor_kwargs,mm_processor_kwargs.*}", "prompts are text"),
    translated("data.sampler.{class_path,class_name}", "sampler", "`data.sampler`: FILE.py:CLASS"),
    not_supported(
        "data.sampler.*",
        "a sampler has no settings of its own",
        "write them into its class (docs/data.md)",
    ),
    not_supported("data.datagen.*", "rows are not made during a run", "remove it"),
    not_supported(
        "data.{filter_accuracy,accuracy_lower_bound,accuracy_upper_bound,oversample_factor}",
        "prompts are not filtered by a band of accuracy (PRIME)",
        "set algorithm.filter_groups.enable=True, which replaces prompts without signal",
        switch="data.filter_accuracy",
    ),
    not_supported("data.min_response_length", "there is no minimum response length", "remove it", off=("0",)),
)

_MANAGER = "{reward_model.reward_manager,reward_manager.name,reward.reward_manager.name}"
REWARDS: tuple[Rule, ...] = (
    translated(
        _MANAGER,
        "manager",
        "one manager does what `naive`, `dapo` and `gdpo` do, by `reward.overlong_buffer` and `reward.functions`",
    ),
    not_supported(
        "{reward_manager,reward.reward_manager}.source",
        "managers of your own are not loaded",
        "write a reward function: custom_reward_function.path=FILE",
        off=("register",),
    ),
    not_needed("{reward_manager,reward.reward_manager}.module.*", "read only where the manager's source is importlib"),
    not_needed("reward_model.reward_loop_*", "there is one manager of rewards"),
    not_supported(
        "reward_model.reward_loop_module_path", "managers of your own are not loaded", "write a reward function"
    ),
    not_needed(
        "reward_model.{launch_reward_fn_async,use_reward_loop}", "responses are scored while others are generated"
    ),
    translated(
        "{reward_model,reward}.reward_kwargs.max_resp_len",
        "longest",
        "checked: the overlong buffer ends at `data.max_response_length`",
    ),
    not_needed("reward.overlong_buffer.log", "reward/* shows the penalty beside the score"),
    not_supported(
        "{sandbox_fusion,reward_model.sandbox_fusion,reward.sandbox_fusion}.url",
        "programs run in posttrain's own sandbox",
        "remove it (docs/sandbox.md); a server of your own is a reward function: custom_reward_function.path=URL",
    ),
    not_needed(
        "{sandbox_fusion,reward_model.sandbox_fusion,reward.sandbox_fusion}.{max_concurrent,memory_limit_mb}",
        "limits of a server; posttrain's own sandbox has reward.sandbox.*",
    ),
    not_supported(
        "{reward_model,reward.reward_model}.{enable_resource_pool,nnodes,n_gpus_per_node}",
        "the reward model shares the workers' devices",
        "remove it",
        switch="reward_model.enable_resource_pool",
    ),
    not_needed("reward_model.model.use_remove_padding", "conversations are packed without padding"),
    not_supported(
        "reward_model.{model.update,model.beta_train,model.optim.*,mini_batch_size}",
        "the reward model is not trained during the run (PRIME)",
        "remove it; `posttrain reward-model` trains one",
    ),
    not_supported(
        "{reward_model,reward}.{reward_kwargs.*,elliptical.*}",
        "arguments of a reward manager of a recipe",
        "give arguments to a reward function: custom_reward_function.reward_kwargs",
    ),
)

ALGORITHM_RULES: tuple[Rule, ...] = (*ALGORITHM, *DATA, *REWARDS)
