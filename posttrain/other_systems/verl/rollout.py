"""verl's keys of the rollout (engines of other processes, agents, tools), of the algorithm, of data and of rewards."""

from __future__ import annotations

from posttrain.other_systems.verl.rule import ASYNC, Rule, not_needed, not_supported, translated

_ROLLOUT = "actor_rollout_ref.rollout"

ENGINE: tuple[Rule, ...] = (
    not_needed(
        f"{_ROLLOUT}.{{cudagraph_capture_sizes,enable_chunked_prefill,enable_prefix_caching,"
        "disable_log_stats,scheduling_policy,skip_tokenizer_init,moe_load_balance_metrics_interval}",
        "the engine does it by itself: chunked prefill, prefix sharing, CUDA graphs",
    ),
    not_needed(
        f"{_ROLLOUT}.{{load_format,layered_summon}}",
        "the rollout has the trainer's own weights and adapters, and loads none",
    ),
    not_needed(
        f"{_ROLLOUT}.{{free_cache_engine,enable_sleep_mode,multi_stage_wake_up}}",
        "the engine gives its memory back before the update, and wakes in two stages",
    ),
    not_needed(
        f"{_ROLLOUT}.engine_kwargs.{{trtllm,trtllm.*,dynamo,dynamo.*}}",
        "they are arguments of an engine that is not built here",
    ),
    not_needed(
        f"{_ROLLOUT}.checkpoint_engine.{{backend,custom_backend_module,engine_kwargs,engine_kwargs.*}}",
        "weights take the fastest way that serves all workers: rollout.weight_sync=auto, which is nccl between GPUs",
    ),
    not_needed(f"{_ROLLOUT}.layer_name_map.*", "weights travel under their Hugging Face names"),
    not_needed(f"{_ROLLOUT}.max_model_len", "the longest row is data.max_prompt_length + data.max_response_length"),
    not_needed(f"{_ROLLOUT}.data_parallel_size", "prompts are spread over all engines that there are"),
    not_needed(
        f"{_ROLLOUT}.{{expert_parallel_size,moe_tensor_parallel_size}}",
        "experts are split as the other matrices are, over the workers that hold an engine",
    ),
    not_supported(
        f"{_ROLLOUT}.dtype",
        "the rollout decodes with the trainer's own weights",
        "set actor_rollout_ref.model.dtype",
        off=("bfloat16", "bf16", "auto"),
    ),
    not_supported(
        f"{_ROLLOUT}.quantization_config_file",
        "the rollout decodes with the trainer's own weights",
        "remove it; set actor_rollout_ref.rollout.quantization=fp8",
    ),
    not_needed(f"{_ROLLOUT}.mode", "responses are generated and scored side by side in any case"),
    not_needed(f"{_ROLLOUT}.calculate_log_probs", "the rollout always gives its log-probs; mismatch/* compares them"),
    not_supported(
        f"{_ROLLOUT}.logprobs_mode",
        "log-probs are those of logits / temperature",
        "remove it",
        off=("processed_logprobs",),
    ),
    not_supported(
        f"{_ROLLOUT}.do_sample",
        "training needs samples",
        "remove it; validation has val_kwargs.do_sample",
        off=("true",),
    ),
    not_supported(f"{_ROLLOUT}.seed", "one seed decides the run", "set trainer.seed", off=("42", "0", "1")),
    translated(f"{_ROLLOUT}.full_determinism", "deterministic", "`trainer.deterministic`"),
    not_needed(f"{_ROLLOUT}.over_sample_rate", "every response is waited for, and none is given up (nor in verl 0.9)"),
    not_supported(f"{_ROLLOUT}.mtp", "multi-token prediction is not built", "remove it"),
    not_supported(
        f"{_ROLLOUT}.disaggregation.*",
        "prefill and decoding run in one engine",
        "remove it",
        switch="disaggregation.enabled",
    ),
    not_supported(
        "actor_rollout_ref.actor.router_replay.{record_file,replay_file}",
        "routes of experts travel with their rows, and are saved with the batches of a checkpoint",
        "remove it",
        off=("null",),
    ),
    not_supported(
        "actor_rollout_ref.ref.router_replay.*",
        "the reference has weights of its own, and routes tokens by them",
        "remove it; actor_rollout_ref.actor.router_replay.mode is the policy's",
        off=("disabled", "null"),
    ),
    not_supported(
        f"{_ROLLOUT}.{{skip_rollout,skip_dump_dir}}",
        "a run does not take its responses from a dump",
        "remove it",
        switch="rollout.skip_rollout",
    ),
    not_needed(
        f"{_ROLLOUT}.{{trace.*,prometheus.*}}", "samples/ holds every response, metrics.jsonl the engine's figures"
    ),
    not_needed(f"{_ROLLOUT}.limit_images", "prompts are text"),
    not_needed(
        "{reward_model.rollout,reward.reward_model.rollout}.*",
        "the reward model is computed by posttrain, not served: reward_model.micro_batch_size_per_gpu and "
        "forward_max_token_len_per_gpu bound its passes",
    ),
)

ELSEWHERE: tuple[Rule, ...] = (
    translated(
        f"{_ROLLOUT}.total_rollout_steps",
        "total_prompts",
        "`trainer.total_training_steps`: prompts divided by data.train_batch_size",
    ),
    translated(f"{_ROLLOUT}.{{test_freq,total_epochs}}", "of_trainer", "`trainer.test_freq`, `trainer.total_epochs`"),
    not_supported(f"{_ROLLOUT}.standalone_gpu_memory_utilization", ASYNC, f"set {_ROLLOUT}.gpu_memory_utilization"),
)

AGENTS: tuple[Rule, ...] = (
    not_needed(f"{_ROLLOUT}.agent.num_workers", "agents run in worker processes (rollout.agent.processes)"),
    not_supported(
        f"{_ROLLOUT}.agent.{{agent_loop_manager_class,custom_async_server.*}}",
        "posttrain's own conversation loop drives agents",
        "remove it",
    ),
    translated(
        f"{_ROLLOUT}.multi_turn.max_user_turns",
        "user_turns",
        "`multi_turn.max_assistant_turns`: this value plus 1, because the model also answers the last user turn; "
        "if both are set, the lower limit applies",
    ),
    not_needed(
        f"{_ROLLOUT}.multi_turn.{{tokenization_sanity_check_mode,use_inference_chat_template}}",
        "sampled tokens are never rendered and tokenized again",
    ),
    not_supported(
        f"{_ROLLOUT}.multi_turn.num_repeat_rollouts",
        "a conversation is not repeated from its middle",
        f"remove it; {_ROLLOUT}.n responses are sampled for each prompt",
    ),
    not_needed("data.continuous_token.*", "sampled tokens are never rendered and tokenized again"),
)

ROLLOUT_RULES: tuple[Rule, ...] = (*ENGINE, *ELSEWHERE, *AGENTS)


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
        "batches always hold the messages; what no stage reads is not kept",
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
    translated(
        "{reward_model,reward.reward_model}.{enable_resource_pool,nnodes,n_gpus_per_node}",
        "reward_model_pool",
        "`reward_model.n_workers`: machines x workers on each, where `enable_resource_pool` is on",
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
