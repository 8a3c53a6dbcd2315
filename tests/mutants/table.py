"""The faults: what is replaced by what, and the tests of which one has to fail.

A general mutation tester changes operators and constants blindly; most of what it makes of this code is equivalent, or
fails to import, and each trial costs a test session. These are faults that a user would be hurt by, most of them once
survivors, with the files whose tests are to see them.
"""

# ruff: noqa: E501  code stands here as it stands there
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """``old``: text that stands exactly once in ``file`` (below hybridengine/); ``tests``: below tests/."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


LOOP, SCHEDULES = ("unit/test_loop.py",), ("unit/schedule",)
RESIDENCY, CHECKPOINT = ("unit/memory/test_residency.py",), ("distributed/test_checkpoint.py",)

MUTANTS = [
    # -- the loop
    Mutant("resume never loads", "loop.py",
        "self.checkpointer.load(self._saved(), self.config.checkpoint.resume)", "None", LOOP),
    Mutant("a resumed run starts at step 0", "loop.py", 'self.step = int(extra["step"])', "self.step = 0", LOOP),
    Mutant("rollout state not restored", "loop.py",
        'self.rollouts.load_state_dict(extra["rollouts"])', "pass", LOOP),
    Mutant("the step is counted after the save", "loop.py",
        '"step": self.step, "record"', '"step": self.step - 1, "record"', LOOP),
    Mutant("interruption never looked at", "loop.py",
        "while self.step < self.total_steps and not self._interrupted():", "while self.step < self.total_steps:", LOOP),
    Mutant("reference scored by the policy", "loop.py",
        "scores.reference = self._logprobs(plain, reference=True)", "scores.reference = self._logprobs(plain)", LOOP),
    Mutant("mini-batches in the same order in every step", "loop.py",
        "self.config.seed + 1000003 * self.step + epoch", "self.config.seed + epoch", LOOP),
    Mutant("and in every epoch", "loop.py", "1000003 * self.step + epoch", "1000003 * self.step", LOOP),
    Mutant("validation accuracy constant", "loop.py", "sum(correct) / len(correct)", "1.0", LOOP),
    Mutant("a lost pool is not saved", "loop.py", """        except RolloutLostError:
            self._save()
            raise""", """        except RolloutLostError:
            raise""", LOOP),
    Mutant("nothing saved at the end", "loop.py", """        if self.config.checkpoint.at_end:
            self._save()""", """        if self.config.checkpoint.at_end:
            pass""", LOOP),
    Mutant("saved twice", "loop.py", "        if self.saved_step == self.step:\n            return\n", "", LOOP),
    Mutant("old log-probabilities where the update gives them", "loop.py",
        "if self.algorithm.needs_old_logprobs:", "if True:", LOOP),
    Mutant("the critic never warms up", "loop.py",
        "if self.critic is None or not self.critic.in_warmup(self.step):", "if True:", LOOP),
    Mutant("rewards of the model added after the baseline", "loop.py",
        "        trajectories, counted = batch\n        self._add_model_rewards(trajectories)\n",
        "        trajectories, counted = batch\n", ("unit/test_loop.py", "distributed/test_reward_model.py")),
    Mutant("an update without tokens counts", "loop.py", "if not counts.tokens:", "if False:",
        ("unit/test_skipped_updates.py",)),
    # -- interruption
    Mutant("interruption not agreed", "interrupt.py", "        dist.all_reduce(flag, op=dist.ReduceOp.MAX)\n", "",
        ("unit/test_interrupt.py", "distributed/test_interrupt.py")),
    Mutant("a repeated signal kills", "interrupt.py", "> REPEAT_SECONDS", "> -1", ("unit/test_interrupt.py",)),
    Mutant("a later signal is ignored", "interrupt.py", "> REPEAT_SECONDS", "> 1e9", ("unit/test_interrupt.py",)),
    Mutant("torchrun gone before the request", "interrupt.py",
        "not any(is_python(pid) for pid in ancestors(os.getpid()))", "False", ("unit/test_interrupt.py",)),
    # -- mismatch
    Mutant("the largest mismatch is one rank's", "mismatch.py",
        "dist.all_reduce(largest, op=dist.ReduceOp.MAX)", "pass", ("distributed/test_mismatch.py",)),
    Mutant("mean mismatch over all tokens", "mismatch.py", "(sums[0] / sums[1])", "(sums[0] / sums[2])",
        ("distributed/test_mismatch.py",)),
    Mutant("mismatch of older versions too", "mismatch.py", "torch.tensor(versions) == self.version",
        "torch.tensor(versions) <= self.version", ("distributed/test_mismatch.py",)),
    Mutant("signed mismatch", "mismatch.py", "torch.tensor(trainer)).abs()", "torch.tensor(trainer))",
        ("distributed/test_mismatch.py",)),
    # -- sampling
    Mutant("validation sampled as in training", "sampling.py", "temperature=v.temperature",
        "temperature=config.rollout.temperature", ("unit/test_sampling.py",)),
    Mutant("top_k dropped", "sampling.py", "top_p=r.top_p, top_k=r.top_k,", "top_p=r.top_p,",
        ("unit/test_sampling.py",)),
    Mutant("stop strings dropped in validation", "sampling.py",
        "min_p=v.min_p, stop=as_texts(config.rollout.stop)", "min_p=v.min_p", ("unit/test_sampling.py",)),
    Mutant("end tokens of the tokenizer dropped", "assemble.py",
        "[] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]", "[]", ("unit/test_sampling.py",)),
    # -- recovery
    Mutant("memory of a dead engine trusted", "schedule/recovery.py",
        "self._sharding.weight_sync.transfer.invalidate()", "pass", ("unit/schedule/test_recovery.py",)),
    Mutant("interrupted samples not restored", "schedule/recovery.py",
        "del sample.token_ids[length:], sample.logprobs[length:], sample.versions[length:]", "pass",
        ("unit/schedule/test_recovery.py",)),
    Mutant("nothing undone before the retry", "schedule/recovery.py", "            undo()\n", "",
        ("unit/schedule/test_recovery.py",)),
    Mutant("restarts not counted", "schedule/recovery.py", "self.restarts += 1", "pass",
        ("unit/schedule/test_recovery.py",)),
    # -- the mode switch
    Mutant("a blank engine is not synced again", "sync/sharding.py",
        "self.rollout.weights_version != self.train.version or residency.is_blank(ROLLOUT_WEIGHTS)",
        "self.rollout.weights_version != self.train.version", ("unit/sync/test_sharding.py",)),
    Mutant("weights count during a sync", "sync/sharding.py",
        "                    residency.invalidate(ROLLOUT_WEIGHTS)\n", "", ("unit/sync/test_sharding.py",)),
    Mutant("weights never count as filled", "sync/sharding.py",
        "                residency.mark_filled(ROLLOUT_WEIGHTS)\n", "", ("unit/sync/test_sharding.py",)),
    Mutant("every rollout syncs", "sync/sharding.py",
        "if self.rollout.weights_version != self.train.version or", "if True or", ("unit/sync/test_sharding.py",)),
    Mutant("a failed begin is one rank's own", "sync/weight_sync.py",
        """            with agree(f"beginning the {what}", self._group):
                self._begin()""", """            self._begin()""",
        ("distributed/sync/test_weight_sync.py", "unit/sync/test_weight_sync.py")),
    Mutant("a failed finish is one rank's own", "sync/weight_sync.py",
        """            with agree(f"finishing the {what}", self._group):
                self._finish(version)""", """            self._finish(version)""",
        ("distributed/sync/test_weight_sync.py", "unit/sync/test_weight_sync.py")),
    Mutant("making room is one rank's own", "sync/sharding.py",
        """                with agree("making room for a weight sync"):
                    residency.enter(SYNC)
                    residency.invalidate(ROLLOUT_WEIGHTS)""", """                residency.enter(SYNC)
                residency.invalidate(ROLLOUT_WEIGHTS)""", ("unit/sync/test_sharding.py", "distributed/sync/test_weight_sync.py")),
    # -- residency
    Mutant("KV cache kept during a sync", "memory/residency.py",
        "leaves=(OPTIMIZER, GRADS, REFERENCE, CRITIC, REWARD_MODEL, KV_CACHE, GRAPHS),\n    needs=(TRAINER_PARAMS,",
        "leaves=(OPTIMIZER, GRADS, REFERENCE, CRITIC, REWARD_MODEL, GRAPHS),\n    needs=(TRAINER_PARAMS,", RESIDENCY),
    Mutant("reference kept in training", "memory/residency.py",
        "leaves=(KV_CACHE, GRAPHS, ROLLOUT_WEIGHTS, REFERENCE, CRITIC, REWARD_MODEL),\n    needs=(TRAINER_PARAMS, GRADS)",
        "leaves=(KV_CACHE, GRAPHS, ROLLOUT_WEIGHTS, CRITIC, REWARD_MODEL),\n    needs=(TRAINER_PARAMS, GRADS)", RESIDENCY),
    Mutant("optimizer kept in a rollout", "memory/residency.py",
        "leaves=(OPTIMIZER, GRADS, REFERENCE, CRITIC, REWARD_MODEL, TRAINER_PARAMS)",
        "leaves=(GRADS, REFERENCE, CRITIC, REWARD_MODEL, TRAINER_PARAMS)", RESIDENCY),
    Mutant("training weights kept in a rollout", "memory/residency.py",
        "leaves=(OPTIMIZER, GRADS, REFERENCE, CRITIC, REWARD_MODEL, TRAINER_PARAMS)",
        "leaves=(OPTIMIZER, GRADS, REFERENCE, CRITIC, REWARD_MODEL)", RESIDENCY),
    Mutant("critic kept while the reference scores", "memory/residency.py",
        "OPTIMIZER, GRADS, CRITIC, REWARD_MODEL), needs=(REFERENCE,)", "OPTIMIZER, GRADS, REWARD_MODEL), needs=(REFERENCE,)",
        RESIDENCY),
    Mutant("dropped contents can be offloaded", "memory/residency.py",
        "if to is State.HOST and owner in self._blank:", "if False:", RESIDENCY),
    Mutant("aliased training weights may leave", "memory/residency.py",
        "        if self.aliased and owner == TRAINER_PARAMS and to is not State.DEVICE and in_use:",
        "        if False:", (*RESIDENCY, "unit/sync/test_sharding.py")),
    Mutant("a rollout on blank weights", "memory/residency.py",
        "if ROLLOUT_WEIGHTS in self._blank and phase is ROLLOUT:", "if False:", RESIDENCY),
    Mutant("cached blocks not handed back", "memory/residency.py",
        "if leaving and self._after_leaving is not None:", "if False:", RESIDENCY),
    Mutant("what starts dropped counts as filled", "memory/residency.py",
        "{owner for owner in NEED_FILLING if self._state.get(owner) is State.DROPPED}", "set()", RESIDENCY),
    # -- checkpoints
    Mutant("older step is the newest", "checkpoint/checkpointer.py",
        "return max(self._complete(), key=_saved_at, default=None)",
        "return min(self._complete(), key=_saved_at, default=None)", ("unit/test_checkpoint_files.py",)),
    Mutant("the newest is pruned", "checkpoint/checkpointer.py", "for path in by_age[: -self.keep]:",
        "for path in by_age[self.keep :]:", CHECKPOINT),
    Mutant("the best is pruned", "checkpoint/checkpointer.py", "            if path == best:\n                continue\n",
        "", ("unit/test_saving.py", "unit/test_checkpoint_files.py")),
    Mutant("rank 0's generators for all", "checkpoint/checkpointer.py", "rng_{_rank() % meta['world_size']}.pt", "rng_0.pt",
        ("distributed/test_checkpoint_ranks.py",)),
    Mutant("generators not restored", "checkpoint/checkpointer.py", "        _set_rng_state(rng)\n", "", ("distributed/test_checkpoint_ranks.py",)),
    Mutant("checksums not compared", "checkpoint/checkpointer.py",
        "            check_checksums(path, {name: sums[name] for name in sorted(sums)[_rank() :: _world_size()]})\n", "",
        CHECKPOINT),
    Mutant("published before its files are on disk", "checkpoint/checkpointer.py",
        """        _sync(staging / "engine")
        _sync(staging)
""", "", ("unit/test_checkpoint_files.py",)),
    Mutant("written in place", "checkpoint/checkpointer.py",
        'staging = final.with_name(final.name + ".tmp")\n        with agree(f"preparing', 'staging = final\n        with agree(f"preparing',
        CHECKPOINT),
    Mutant("a version that differs is accepted", "checkpoint/checkpointer.py", 'if engine.version != meta["version"]:',
        "if False:", ("unit/test_checkpoint_files.py", *CHECKPOINT)),
    Mutant("crashed halves not cleaned", "checkpoint/checkpointer.py",
        '        for path in self.directory.glob("step_*.tmp"):\n            shutil.rmtree(path)\n', "", CHECKPOINT),
    Mutant("saved at any time", "checkpoint/policy.py", "step % self._config.every == 0", "step % self._config.every == 1",
        ("unit/test_loop.py", "unit/test_saving.py")),
    Mutant("best is the worst", "checkpoint/policy.py", "if not _first_rank_says(value > self._best):",
        "if not _first_rank_says(value < self._best):", ("unit/test_saving.py",)),
    # -- the pool
    Mutant("one batch too many in flight", "schedule/pool.py", "(self.staleness + self.step + 1 - self.taken)",
        "(self.staleness + self.step + 2 - self.taken)", SCHEDULES),
    Mutant("old groups are trained on", "schedule/pool.py", "if self.step - group.admitted_at <= self.staleness]",
        "if True]", SCHEDULES),
    Mutant("a batch in order of completion", "schedule/pool.py",
        "chosen = sorted(self._ready, key=lambda group: group.index)[: self.batch]", "chosen = self._ready[: self.batch]",
        SCHEDULES),
    Mutant("a pool forgets what is ready", "schedule/pool.py", "groups = [*self._ready, *self._open.values()]",
        "groups = [*self._open.values()]", SCHEDULES),
    Mutant("a resumed pool counts from 0", "schedule/pool.py", 'self.step = self.taken = int(state["step"])',
        "self.step = self.taken = 0", SCHEDULES),
    Mutant("recycled groups come last", "schedule/pool.py",
        "return sorted(self._open.values(), key=lambda group: not group.is_started)",
        "return sorted(self._open.values(), key=lambda group: group.is_started)", SCHEDULES),
    Mutant("the short ones first", "schedule/pool.py", "-expected_length.get(g.prompt.text, average)",
        "expected_length.get(g.prompt.text, average)", SCHEDULES),
    # -- losses, batching, optimizer
    Mutant("clip_ratio/high counts the wrong sign", "algorithms/losses.py",
        "(batch.mask & (ratio > 1 + high) & (batch.advantages > 0))",
        "(batch.mask & (ratio > 1 + high) & (batch.advantages < 0))", ("unit/algorithms",)),
    Mutant("clip_ratio/low counts the wrong sign", "algorithms/losses.py",
        "(batch.mask & (ratio < 1 - low) & (batch.advantages < 0))",
        "(batch.mask & (ratio < 1 - low) & (batch.advantages > 0))", ("unit/algorithms",)),
    Mutant("the clip on one side", "algorithms/losses.py", "clipped = ratio.clamp(1 - low, 1 + high)",
        "clipped = ratio.clamp(max=1 + high)", ("unit/algorithms",)),
    Mutant("sequences without a token count", "algorithms/losses.py", "sum(count > 0 for count in trained)",
        "len(trained)", ("unit/algorithms", "unit/test_skipped_updates.py")),
    Mutant("approx_kl with its arguments swapped", "algorithms/base.py", "kl_estimate(batch.old, batch.logprobs.detach(), \"k3\")",
        "kl_estimate(batch.logprobs.detach(), batch.old, \"k3\")", ("unit/algorithms",)),
    Mutant("the rate is a step early", "engines/train/optim.py", "config.lr * (step + 1) / config.warmup_steps",
        "config.lr * step / config.warmup_steps", ("unit/engines/train/test_optim.py",)),
    Mutant("the last rate above the minimum", "engines/train/optim.py", "max(total_steps - 1 - first, 1)",
        "max(total_steps - first, 1)", ("unit/engines/train/test_optim.py",)),
    Mutant("moments without their step", "engines/train/optim.py", '                self._state(param)["step"].fill_(float(steps))',
        "                pass", ("unit/engines/train/test_optim.py", *CHECKPOINT)),
    Mutant("the gradient norm is one rank's", "engines/train/optim.py", "dist.all_reduce(total, group=group)", "pass",
        ("distributed/engines/train/fsdp/test_engine.py",)),
    Mutant("norms are decayed", "engines/train/optim.py", 'return len(shape) > 1 and not name.endswith(".bias")',
        "return True", ("unit/engines/train/test_optim.py",)),
    Mutant("groups cut by mini-batches", "engines/train/batching.py", "random.Random(seed).shuffle(groups)", "pass",
        ("unit/engines/train/test_batching.py", "unit/test_loop.py")),
    Mutant("ranks without balance", "engines/train/batching.py",
        "sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):\n        load, count, rank",
        "range(len(lengths)):\n        load, count, rank", ("unit/engines/train/test_batching.py",)),
    Mutant("the schedule's total without epochs and mini-batches", "assemble.py",
        "max(inputs.total_steps - late, 1) * epochs * mini_batches", "max(inputs.total_steps - late, 1)",
        ("unit/test_assemble.py",)),
    Mutant("trajectories in order of arrival", "distributed/exchange.py",
        "sorted(found, key=lambda t: (position[t.prompt.index], t.sample_index))", "found",
        ("distributed/test_exchange.py",)),
    Mutant("versions lost on the way", "distributed/exchange.py", 'versions=packed["versions"][part].tolist(),',
        "versions=[],", ("distributed/test_exchange.py",)),
    # -- weight transfer
    Mutant("generation published before the version", "sync/transfer/control.py",
        '''        self.set("version", version)
        self.set("generation", generation)''', '''        self.set("generation", generation)
        self.set("version", version)''', ("unit/sync/transfer/test_control.py",)),
    Mutant("another version is taken", "sync/transfer/control.py", "or held != version:", "or False:",
        ("unit/sync/transfer/test_control.py",)),
    Mutant("page version unchecked", "sync/transfer/control.py", 'elif self.get("magic") != _MAGIC:', "elif False:",
        ("unit/sync/transfer/test_control.py",)),
    Mutant("fingerprints never differ", "sync/transfer/fingerprint.py", "np.flatnonzero(target != source)",
        "np.flatnonzero(target != target)", ("unit/sync/test_fingerprint.py",)),
    Mutant("elements held twice are counted once", "sync/transfer/fingerprint.py",
        "earlier = [p.box for pieces in pattern.ranks[: self._rank] for p in pieces]", "earlier = []",
        ("unit/sync/test_fingerprint.py",)),
    Mutant("a local copy is not proven", "sync/transfer/fingerprint.py",
        "rest = subtract_all(piece.box, (other.box for other in served))", "rest = []",
        ("unit/sync/test_fingerprint.py",)),
]  # fmt: skip
