"""Where the keys of verl and TRL went: read by docs/config.md, and by the answer to an unknown key."""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

VERL_VERSION, TRL_VERSION = "0.9", "1.16"


class Equivalent(NamedTuple):
    """One line of the table; ``ours`` lists our keys, separated by ", "."""

    ours: str
    verl: str
    trl: str
    note: str = ""


#: verl's actor_rollout_ref.{actor,rollout,ref,model} are written {actor,rollout,ref,model} here.
EQUIVALENTS = (
    Equivalent(
        "model.path", "model.path", "GRPOTrainer(model=...), model_name_or_path", "a directory; nothing is downloaded"
    ),
    Equivalent("model.tokenizer", "model.tokenizer_path", "GRPOTrainer(processing_class=...)"),
    Equivalent("model.chat_template", "model.custom_chat_template", "—", "a Jinja file"),
    Equivalent("model.trust_remote_code", "model.trust_remote_code", "trust_remote_code"),
    Equivalent("train.engine", "actor.strategy", "accelerate config"),
    Equivalent("train.dtype", "actor.fsdp_config.dtype", "bf16", "compute; master weights are float32"),
    Equivalent("train.lr", "actor.optim.lr", "learning_rate"),
    Equivalent("train.lr_schedule", "actor.optim.lr_scheduler_type", "lr_scheduler_type"),
    Equivalent(
        "train.warmup_steps",
        "actor.optim.lr_warmup_steps, actor.optim.lr_warmup_steps_ratio",
        "warmup_steps, warmup_ratio",
        "optimizer steps, not a share; the first has lr / warmup_steps here and 0 there; the last of cosine and linear "
        "has min_lr_ratio of it here, and there the step after it",
    ),
    Equivalent("train.min_lr_ratio", "actor.optim.min_lr_ratio", "lr_scheduler_kwargs"),
    Equivalent("train.weight_decay", "actor.optim.weight_decay", "weight_decay"),
    Equivalent("train.beta1, train.beta2", "actor.optim.betas", "adam_beta1, adam_beta2"),
    Equivalent("train.eps", "actor.optim.override_optimizer_config", "adam_epsilon"),
    Equivalent("train.max_grad_norm", "actor.optim.clip_grad", "max_grad_norm", "0 = off"),
    Equivalent(
        "train.max_tokens_per_micro_batch",
        "actor.ppo_max_token_len_per_gpu (with actor.use_dynamic_bsz=True)",
        "per_device_train_batch_size, gradient_accumulation_steps",
        "only memory depends on it, the result does not",
    ),
    Equivalent("train.packing", "model.use_remove_padding", "—"),
    Equivalent(
        "train.activation_checkpointing",
        "model.enable_gradient_checkpointing",
        "gradient_checkpointing",
    ),
    Equivalent("train.reshard_after_forward", "actor.fsdp_config.reshard_after_forward", "accelerate config"),
    Equivalent(
        "train.logprob_chunk_tokens",
        "actor.entropy_from_logits_chunk_size",
        "use_liger_kernel",
    ),
    Equivalent("train.tp", "actor.megatron.tensor_model_parallel_size", "—", "train=megatron, as the next four"),
    Equivalent("train.pp", "actor.megatron.pipeline_model_parallel_size", "—"),
    Equivalent("train.vpp", "actor.megatron.virtual_pipeline_model_parallel_size", "—", "chunks of each stage"),
    Equivalent("train.ep", "actor.megatron.expert_model_parallel_size", "—"),
    Equivalent("train.sequence_parallel", "actor.megatron.sequence_parallel", "—"),
    Equivalent("train.moe_balancing_coef", "—", "router_aux_loss_coef", "with train.moe_balancing=aux_loss"),
    Equivalent(
        "memory.offload_weights",
        "actor.fsdp_config.param_offload, ref.fsdp_config.param_offload, actor.megatron.param_offload",
        "—",
    ),
    Equivalent(
        "memory.offload_optimizer",
        "actor.fsdp_config.optimizer_offload, actor.megatron.optimizer_offload",
        "—",
    ),
    Equivalent("rollout.engine", "rollout.name", "use_vllm, vllm_mode=colocate"),
    Equivalent("rollout.tp", "rollout.tensor_model_parallel_size", "vllm_tensor_parallel_size"),
    Equivalent("rollout.samples_per_prompt", "rollout.n", "num_generations"),
    Equivalent("rollout.max_tokens", "data.max_response_length", "max_completion_length"),
    Equivalent("rollout.temperature", "rollout.temperature", "temperature"),
    Equivalent("rollout.top_p", "rollout.top_p", "top_p"),
    Equivalent("rollout.top_k", "rollout.top_k", "top_k", "off is 0 (verl: -1)"),
    Equivalent("rollout.min_p", "—", "min_p"),
    Equivalent("rollout.stop", "—", "generation_kwargs[stop]", "the stop text stays in the response"),
    Equivalent("rollout.dtype", "rollout.dtype", "model_init_kwargs[dtype]"),
    Equivalent("rollout.max_model_len", "rollout.max_model_len", "vllm_max_model_length"),
    Equivalent("rollout.max_num_seqs", "rollout.max_num_seqs", "—"),
    Equivalent(
        "rollout.gpu_memory_utilization",
        "rollout.gpu_memory_utilization",
        "vllm_gpu_memory_utilization",
    ),
    Equivalent("rollout.enforce_eager", "rollout.enforce_eager", "—"),
    Equivalent("rollout.prefix_caching", "rollout.enable_prefix_caching", "—"),
    Equivalent("rollout.sleep_level", "rollout.free_cache_engine", "vllm_enable_sleep_mode"),
    Equivalent("rollout.validation.temperature", "rollout.val_kwargs.temperature", "—"),
    Equivalent("rollout.validation.n", "rollout.val_kwargs.n", "num_generations_eval"),
    Equivalent(
        "rollout.validation.top_p, rollout.validation.top_k", "rollout.val_kwargs.top_p, rollout.val_kwargs.top_k", "—"
    ),
    Equivalent("rollout.engine_kwargs", "rollout.engine_kwargs.vllm", "—"),
    Equivalent(
        "sync.bucket_mib",
        "rollout.checkpoint_engine.update_weights_bucket_megabytes",
        "—",
    ),
    Equivalent(
        "algorithm.name",
        "actor.policy_loss.loss_mode",
        "loss_type, importance_sampling_level",
        "gspo: TRL grpo with level sequence; cispo, sapo: the same names",
    ),
    Equivalent(
        "algorithm.kwargs",
        "actor.tau_pos, actor.tau_neg",
        "sapo_temperature_pos, sapo_temperature_neg",
        "algorithm=sapo: tau_positive, tau_negative",
    ),
    Equivalent(
        "algorithm.advantage",
        "algorithm.adv_estimator, algorithm.norm_adv_by_std_in_grpo",
        "scale_rewards",
        "group_std: verl grpo, TRL group (which adds 1e-4 to the deviation, here and verl 1e-6); group_mean: TRL none; "
        "leave_one_out: verl rloo; batch_std: verl reinforce_plus_plus, which whitens tokens, here responses; "
        "group_mean_batch_std: verl reinforce_plus_plus_baseline (TRL batch: without subtracting the batch's mean); "
        "greedy: verl remax",
    ),
    Equivalent("algorithm.clip_low", "actor.clip_ratio_low", "epsilon"),
    Equivalent(
        "algorithm.clip_high",
        "actor.clip_ratio_high",
        "epsilon_high",
        "cispo: TRL's epsilon_high is the bound itself, 1 + clip_high",
    ),
    Equivalent("algorithm.clip_dual", "actor.clip_ratio_c", "delta", "0 = off (verl's default: 3.0)"),
    Equivalent(
        "algorithm.loss_aggregation",
        "actor.loss_agg_mode",
        "loss_type",
        "token-mean: TRL dapo; seq-mean-token-mean: TRL grpo; constant-length: TRL dr_grpo, verl "
        "seq-mean-token-sum-norm (which before 0.9 did not divide by the sequences). A sequence that is masked out "
        "entirely is not counted here; in TRL and, with a global batch size, in verl it is",
    ),
    Equivalent("algorithm.constant_length", "actor.loss_scale_factor", "max_completion_length"),
    Equivalent(
        "algorithm.kl_coef",
        "actor.kl_loss_coef or algorithm.kl_ctrl.kl_coef",
        "beta",
    ),
    Equivalent(
        "algorithm.kl_estimator",
        "actor.kl_loss_type, algorithm.kl_penalty",
        "use_bias_correction_kl",
        "k1: verl kl; k2: verl mse; k3: verl low_var_kl, TRL with false; k3_ratio: TRL's default (true), NeMo-RL's, "
        "and on policy verl's k3+",
    ),
    Equivalent("algorithm.kl_clamp", "—", "—", "verl and NeMo-RL bound the value at 10, which ends the gradient too"),
    Equivalent("algorithm.kl_in", "actor.use_kl_loss, algorithm.use_kl_in_reward", "—"),
    Equivalent("algorithm.entropy_coef", "actor.entropy_coeff", "entropy_coef"),
    Equivalent("algorithm.epochs", "actor.ppo_epochs", "num_iterations"),
    Equivalent(
        "algorithm.kwargs",
        "algorithm.gamma, algorithm.lam",
        "gamma, lam",
        "algorithm=ppo: gamma, lam, whiten; the values of masked tokens are skipped as in verl",
    ),
    Equivalent("critic.path", "critic.model.path", "value_model", "default: the policy's"),
    Equivalent("critic.lr", "critic.optim.lr", "learning_rate", "TRL has one for both"),
    Equivalent("critic.max_grad_norm", "critic.optim.clip_grad", "max_grad_norm"),
    Equivalent(
        "critic.clip", "critic.cliprange_value", "cliprange_value", "null = off; the loss has a factor ½ here too"
    ),
    Equivalent("critic.epochs", "critic.ppo_epochs", "num_ppo_epochs"),
    Equivalent("critic.warmup_steps", "trainer.critic_warmup", "—"),
    Equivalent("reward.model.path", "reward_model.model.path", "reward_model"),
    Equivalent(
        "algorithm.mini_batches",
        "data.train_batch_size / actor.ppo_mini_batch_size",
        "steps_per_generation / gradient_accumulation_steps",
        "their number rather than their size",
    ),
    Equivalent(
        "algorithm.dynamic_sampling.enable",
        "algorithm.filter_groups.enable",
        "—",
        "flat by the total reward",
    ),
    Equivalent("algorithm.dynamic_sampling.max_rounds", "algorithm.filter_groups.max_num_gen_batches", "—"),
    Equivalent("algorithm.drop_zero_variance", "—", "—", "left out of the loss, nothing sampled instead"),
    Equivalent("algorithm.mask_truncated", "—", "mask_truncated_completions"),
    Equivalent(
        "algorithm.overlong_buffer", "reward.reward_kwargs.overlong_buffer_cfg.len", "get_soft_overlong_punishment"
    ),
    Equivalent("algorithm.old_logprobs", "algorithm.rollout_correction.bypass_mode", "—", "rollout: bypass"),
    Equivalent(
        "algorithm.correction.weight, algorithm.correction.outside",
        "algorithm.rollout_correction.rollout_is",
        "vllm_importance_sampling_correction, vllm_importance_sampling_mode",
        "preset tis: verl token, TRL token_truncate; mis: TRL token_mask; TRL's default is sequence_mask with vLLM "
        "(weight=sequence outside=zero bounds=[0,3]), here none under schedule=sync",
    ),
    Equivalent(
        "algorithm.correction.bounds",
        "algorithm.rollout_correction.rollout_is_threshold",
        "vllm_importance_sampling_clip_min, vllm_importance_sampling_clip_max",
        "icepop: verl's low_high",
    ),
    Equivalent(
        "algorithm.correction.reject, algorithm.correction.reject_bounds",
        "algorithm.rollout_correction.rollout_rs, algorithm.rollout_correction.rollout_rs_threshold",
        "—",
        "sequence: verl seq_sum_*, geometric: seq_mean_*; verl bounds rollout / trainer, the reciprocal",
    ),
    Equivalent(
        "reward.fn",
        "reward.custom_reward_function.path, reward.custom_reward_function.name",
        "GRPOTrainer(reward_funcs=...)",
    ),
    Equivalent("reward.kwargs", "reward.custom_reward_function.reward_kwargs", "—"),
    Equivalent("reward.terms", "—", "reward_weights"),
    Equivalent("reward.workers", "reward.num_workers", "—"),
    Equivalent("data.train", "data.train_files", "GRPOTrainer(train_dataset=...), dataset_name"),
    Equivalent("data.validation", "data.val_files", "GRPOTrainer(eval_dataset=...)"),
    Equivalent("data.validation_size", "data.val_max_samples", "—"),
    Equivalent("data.subset", "—", "dataset_config"),
    Equivalent("data.prompt_key", "data.prompt_key", "column prompt"),
    Equivalent("data.answer_key", "column reward_model.ground_truth", "column solution", "any column, nested or not"),
    Equivalent("data.chat_template_kwargs", "data.apply_chat_template_kwargs", "chat_template_kwargs"),
    Equivalent("data.max_prompt_tokens", "data.max_prompt_length", "—"),
    Equivalent("data.overlong", "data.filter_overlong_prompts, data.truncation", "—"),
    Equivalent(
        "data.prompts_per_step",
        "data.train_batch_size",
        "generation_batch_size / num_generations",
        "prompts, over all ranks",
    ),
    Equivalent("data.shuffle", "data.shuffle", "shuffle_dataset"),
    Equivalent("steps", "trainer.total_training_steps", "max_steps", "rollouts, not optimizer steps"),
    Equivalent("epochs", "trainer.total_epochs", "num_train_epochs"),
    Equivalent("validate_every", "trainer.test_freq, trainer.val_before_train", "eval_steps"),
    Equivalent("seed", "data.seed", "seed"),
    Equivalent("name", "trainer.experiment_name", "run_name"),
    Equivalent("output_dir", "trainer.default_local_dir", "output_dir"),
    Equivalent("checkpoint.every", "trainer.save_freq", "save_steps"),
    Equivalent("checkpoint.keep", "trainer.max_actor_ckpt_to_keep", "save_total_limit"),
    Equivalent("checkpoint.resume", "trainer.resume_mode, trainer.resume_from_path", "resume_from_checkpoint"),
    Equivalent("logging.wandb_project", "trainer.project_name, trainer.logger", "report_to"),
    Equivalent("logging.samples", "trainer.log_val_generations", "num_completions_to_print"),
    Equivalent("placement.name", "actor_rollout_ref.hybrid_engine", "vllm_mode", "colocated | disaggregated"),
    Equivalent("distributed.timeout_seconds", "actor_rollout_ref.nccl_timeout", "ddp_timeout"),
)

#: Names of verl and TRL that have no key here, and what there is to do instead. A name ends in "." where everything
#: below it is meant.
NOT_HERE = {
    "trainer.nnodes": "give torchrun --nnodes",
    "trainer.n_gpus_per_node": "give torchrun --nproc-per-node",
    "trainer.device": "a GPU where torch finds one, else the CPU",
    "ray_kwargs.": "there is no Ray: torchrun starts one process per GPU",
    "push_to_hub": "nothing is uploaded; the exported model is in output_dir/model",
    "hub_model_id": "nothing is uploaded; the exported model is in output_dir/model",
    "fp16": "train.dtype takes float32 and bfloat16",
    "deepspeed": "sharding is FSDP2 or Megatron: train=fsdp, train=megatron",
    "per_device_eval_batch_size": "validation batches need no size",
    "gradient_accumulation_steps": "micro-batches follow from train.max_tokens_per_micro_batch",
    "logging_steps": "every step is logged",
    "actor.ppo_micro_batch_size_per_gpu": "micro-batches follow from train.max_tokens_per_micro_batch",
    "rollout.log_prob_micro_batch_size_per_gpu": "micro-batches follow from train.max_tokens_per_micro_batch",
    "ref.log_prob_micro_batch_size_per_gpu": "micro-batches follow from train.max_tokens_per_micro_batch",
    "actor.ulysses_sequence_parallel_size": "sequences are not split over ranks; see train.activation_checkpointing",
    "data.image_key": "text only",
    "data.video_key": "text only",
    "repetition_penalty": "sampling has temperature, top_p, top_k and min_p",
}


class Match(NamedTuple):
    """What an unknown key is called here."""

    ours: str | None  # None where there is nothing of the kind
    program: str  # "verl" or "TRL"
    name: str
    advice: str = ""  # what to mind, or what to do instead


def lookup(path: str) -> Match | None:
    """The key that verl or TRL calls ``path``, in full or by its last two parts or more; None where neither does.

    >>> lookup("actor_rollout_ref.rollout.n").ours, lookup("beta").ours
    ('rollout.samples_per_prompt', 'algorithm.kl_coef')
    """
    path = path.removeprefix("actor_rollout_ref.")
    for name, advice in NOT_HERE.items():
        if path == name or name.endswith(".") and path.startswith(name):
            return Match(None, "verl" if "." in name else "TRL", path, advice)
    for program, names in _names().items():
        if (found := names.get(path)) is not None:
            return Match(found[0], program, path, found[1])
    if "." in path:
        for program, names in _names().items():
            for name, (ours, note) in names.items():
                if name.endswith(f".{path}") or ("." in name and path.endswith(f".{name}")):
                    return Match(ours, program, name, note)
    return None


@functools.cache
def _names() -> dict[str, dict[str, tuple[str, str]]]:
    """Per program: its names, to the first of our keys in their line. Names that stand alone go before parts of one."""
    found: dict[str, dict[str, tuple[str, str]]] = {"verl": {}, "TRL": {}}
    for whole in (True, False):
        for line in EQUIVALENTS:
            ours = line.ours.split(", ")[0]
            for program, cell in (("verl", line.verl), ("TRL", line.trl)):
                for part in cell.split(", "):
                    names = [part] if whole else re.findall(r"[A-Za-z_][\w.]*", part)
                    for name in names:
                        found[program].setdefault(name.removeprefix("actor_rollout_ref."), (ours, line.note))
    for word in ("with", "or", "column", "accelerate", "config", "GRPOTrainer", "True"):
        for names_of_one in found.values():
            names_of_one.pop(word, None)
    return found
