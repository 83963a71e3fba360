"""The table of SGLang's arguments that this runtime does not have, and of values of flags that it
has under other names: each is in one of three classes, with one sentence.

Flags of the command line and arguments of Python go by it alike (`sglang_arguments.py`); `--help`
and docs/flags.md show it. What it does not name is refused; leaving it out is the remedy. SGLang's
defaults, null, false and empty values ask for nothing and are always accepted.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One sentence on arguments.

    Attributes:
        says: how it is so anyway, what happens instead, or what to do instead: by the class. It
            goes on after a colon.
        names: of fields of SGLang's ServerArgs, between blanks.
        values: those that the sentence is on; none: all.
        becomes: the value that a flag of this runtime gets; None: its default.
    """

    says: str
    names: str
    values: tuple[Any, ...] = ()
    becomes: Any = None

    def has(self, value: Any) -> bool:
        """Tells whether the sentence is on a value; words are the same in any case."""
        if isinstance(value, str):
            return any(
                isinstance(item, str) and item.lower() == value.lower() for item in self.values
            )
        return value in self.values


# Arguments that launch scripts still give and the newest SGLang lacks: as in sglang_surface.json.
FORMER: dict[str, Any] = {
    "cuda_graph_bs": [["--cuda-graph-bs"], "*", None],
    "cuda_graph_max_bs": [["--cuda-graph-max-bs"], 1, None],
    "disable_piecewise_cuda_graph": [["--disable-piecewise-cuda-graph"], 0, False],
    "enable_deepep_moe": [["--enable-deepep-moe"], 0, False],
    "enable_ep_moe": [["--enable-ep-moe"], 0, False],
    "enable_nan_detection": [["--enable-nan-detection"], 0, False],
    "enable_piecewise_cuda_graph": [["--enable-piecewise-cuda-graph"], 0, False],
    "stream_output": [["--stream-output"], 0, False],
    "torchao_config": [["--torchao-config"], 1, ""],
}
MORE_NAMES = {"dp_size": ["--dp"], "pp_size": ["--pp"]}

_WORKS = (
    Entry(
        "/metrics is always there",
        "enable_metrics enable_metrics_for_all_schedulers",
    ),
    Entry("answers always say how many prompt tokens were cached", "enable_cache_report"),
    Entry("prompts and decodes always share steps", "enable_mixed_chunk"),
    Entry("memory can always be released and resumed", "enable_memory_saver"),
    Entry(
        "resumed weights always have their values",
        "enable_weights_cpu_backup enable_draft_weights_cpu_backup",
    ),
    Entry("an idle server always sleeps", "sleep_on_idle"),
    Entry("a file of this package runs", "model_impl", ("sglang",), "own"),
    Entry(
        "weights are used as they are",
        "quantization speculative_draft_model_quantization",
        ("unquant", "none"),
    ),
    Entry(
        "the form of weights of 8 bits is that of config.json",
        "quantization",
        ("compressed-tensors",),
    ),
)

_NO_EFFECT = (
    Entry(
        "there are no adapters; whoever asks for some (--enable-lora) is told so",
        "lora_target_modules max_lora_rank max_loras_per_batch max_loaded_loras lora_backend",
    ),
    Entry(
        "the device's default backend is used",
        "attention_backend",
        (
            *("fa3", "fa4", "flashmla", "trtllm_mha", "trtllm_mla", "cutlass_mla", "cutedsl_mla"),
            *("tokenspeed_mla", "hpc_ops", "flex_attention", "intel_amx"),
        ),
    ),
    Entry(
        "--attention-backend names the one backend of all steps",
        "prefill_attention_backend decode_attention_backend speculative_draft_attention_backend"
        " speculative_attention_mode enable_lean_attention",
    ),
    Entry(
        "each device has one set of kernels, chosen at the start",
        "sampling_backend bf16_gemm_backend fp4_gemm_runner_backend fp8_gemm_runner_backend"
        " triton_attention_num_kv_splits triton_attention_reduce_in_fp32"
        " triton_attention_split_tile_size enable_fused_qk_norm_rope enable_amd_monokernel"
        " enable_nvidia_megakernel disable_flashinfer_autotune flashinfer_autotune_skip_ops"
        " enable_torch_compile enable_torch_compile_debug_mode torch_compile_max_bs",
    ),
    Entry(
        "the numbers of requests that CUDA graphs are captured for follow --max-running-requests",
        "cuda_graph_bs cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_max_bs"
        " cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill"
        " cuda_graph_prefill_max_context disable_cuda_graph_padding enable_cudagraph_gc",
    ),
    Entry(
        "--disable-cuda-graph alone says whether there are CUDA graphs",
        "cuda_graph_backend_decode cuda_graph_backend_prefill cuda_graph_config"
        " disable_decode_cuda_graph disable_prefill_cuda_graph enable_piecewise_cuda_graph"
        " disable_piecewise_cuda_graph enable_profile_cuda_graph debug_cuda_graph",
    ),
    Entry("llguidance holds outputs to grammars", "grammar_backend", ("xgrammar", "outlines")),
    Entry("no grammar is kept on disk", "disable_outlines_disk_cache"),
    Entry("code of a model's folder never runs", "trust_remote_code"),
    Entry("safetensors are read as files", "load_format", ("fastsafetensors", "runai_streamer")),
    Entry(
        "weights are read one way, from safetensors",
        "weight_loader_disable_mmap weight_loader_drop_cache_after_load"
        " weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads"
        " model_loader_extra_config startup_weight_load_mode",
    ),
    Entry("the model's files stay", "delete_ckpt_after_loading"),
    Entry("lpm orders the queue, the nearest to it", "schedule_policy", ("dfs-weight",), "lpm"),
    Entry(
        "fcfs orders the queue",
        "schedule_policy",
        ("random", "lof", "hrrn", "shortest-prefill-first", "routing-key"),
        "fcfs",
    ),
    Entry(
        "--chunked-prefill-size and --max-step-ms bound a step's prompt tokens",
        "max_prefill_tokens prefill_max_requests enable_dynamic_chunking enable_prefill_delayer"
        " prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes"
        " prefill_delayer_queue_min_ratio prefill_delayer_token_usage_low_watermark"
        " prefill_decode_interval prefill_decode_interval_min_bs min_free_slots_delay"
        " prefill_delayer_forward_passes_buckets prefill_delayer_wait_seconds_buckets",
    ),
    Entry(
        "the scheduler looks at its queue before each step",
        "num_continuous_decode_steps scheduler_recv_interval",
    ),
    Entry(
        "KV that was used least recently goes first",
        "radix_eviction_policy radix_eviction_policy_config",
    ),
    Entry(
        "texts are encoded and decoded by one process each",
        "tokenizer_worker_num detokenizer_worker_num tokenizer_backend batch_notify_size"
        " enable_tokenizer_batch_encode disable_tokenizer_batch_decode"
        " enable_dynamic_batch_tokenizer dynamic_batch_tokenizer_batch_size"
        " dynamic_batch_tokenizer_batch_timeout enable_http_worker_reuseport",
    ),
    Entry("the operating system places processes and memory", "numa_node"),
    Entry(
        "Python's own thresholds hold, and what the start made is never looked at",
        "gc_threshold gc_warning_threshold_secs",
    ),
    Entry(
        "the log says why a process ended; nothing is dumped",
        "crash_dump_folder soft_watchdog_timeout enable_nan_detection",
    ),
    Entry(
        "--log-level is that of all logs, and requests are in them by --log-requests",
        "log_level_http uvicorn_access_log_exclude_prefixes show_time_cost"
        " enable_request_time_stats_logging",
    ),
    Entry(
        "the buckets of /metrics are fixed, and it has no estimates",
        "bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token"
        " prompt_tokens_buckets generation_tokens_buckets enable_mfu_metrics",
    ),
    Entry(
        "a server has one device and one rank",
        "dist_init_addr dist_timeout nccl_port gpu_id_step load_balance_method mooncake_ib_device"
        " disable_custom_all_reduce enable_p2p_check enable_nccl_nvls enable_symm_mem"
        " enable_torch_symm_mem enable_mscclpp pre_warm_nccl enable_quant_communications"
        " enable_flashinfer_allreduce_fusion enforce_disable_flashinfer_allreduce_fusion"
        " flashinfer_allreduce_fusion_backend enable_aiter_allreduce_fusion"
        " disable_aiter_allreduce_fusion_in_decode disable_aiter_allreduce_fusion_in_prefill"
        " enable_dp_attention enable_dp_attention_local_control_broadcast enable_dp_lm_head"
        " enable_tp_lm_head_all_to_all enable_attn_tp_input_scattered disable_attn_tp_gather"
        " enable_dense_mlp_attn_tp enable_layernorm_sp boundary_reduction"
        " speculative_boundary_reduction dcp_comm_backend dcp_replicate_q_proj cp_strategy"
        " pp_async_batch_depth pp_max_micro_batch_size engine_info_bootstrap_port",
    ),
    Entry(
        "experts are computed in one way here, each by all ranks",
        "moe_runner_backend moe_a2a_backend moe_dense_tp_size speculative_moe_runner_backend"
        " speculative_moe_a2a_backend deepep_config deepep_dispatcher_output_dtype deepep_mode"
        " deepep_v2_mode enable_deepep_moe enable_ep_moe fuseep_mode flashinfer_a2a_dispatch_type"
        " flashinfer_mxfp4_moe_precision enable_eplb eplb_algorithm ep_num_redundant_experts"
        " eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk"
        " eplb_rebalance_num_iterations ep_dispatch_algorithm init_expert_location"
        " expert_balancedness_report_mode expert_distribution_recorder_buffer_size"
        " expert_distribution_recorder_mode enable_waterfill enable_fused_moe_sum_all_reduce"
        " enable_w4a4_mxfp4_megamoe speculative_enable_w4a4_mxfp4_megamoe"
        " enable_megamoe_for_layernorm_sp disable_shared_experts_fusion"
        " enforce_shared_experts_fusion enable_shared_experts_attn_tp shared_experts_tp_size"
        " disable_flashinfer_cutlass_moe_fp4_allgather enable_two_batch_overlap"
        " enable_single_batch_overlap tbo_token_distribution_threshold enable_paged_experts"
        " paged_experts_num_resident",
    ),
    Entry(
        "no model here has Mamba or linear attention layers",
        "max_mamba_cache_size mamba_backend mamba_cache_philox_rounds mamba_full_memory_ratio"
        " mamba_max_states_per_path mamba_radix_cache_strategy mamba_ssm_dtype mamba_track_interval"
        " enable_mamba_cache_stochastic_rounding enable_int8_mamba_checkpoint int8_mamba_ckpt_size"
        " linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend"
        " linear_attn_verify_backend enable_linear_replayssm enable_linear_replayssm_spec"
        " linear_replayssm_cache_len uses_mamba_radix_cache",
    ),
    Entry(
        "no model here has latent or sparse attention",
        "flashinfer_mla_disable_ragged disable_chunked_prefix_cache dsa_decode_backend"
        " dsa_prefill_backend dsa_paged_mqa_logits_backend dsa_topk_backend dsa_triton_union"
        " speculative_dsa_topk_backend enable_dsa_fused_indexer enable_dsa_cache_layer_split"
        " dsv4_attn_backend dsv4_prefill_backend enable_deepseek_v4_fp4_indexer qsa_indexer_dtype"
        " c128_page_size",
    ),
    Entry(
        "layers with a sliding window keep KV of all tokens, as others do",
        "swa_full_tokens_ratio swa_prefix_tails disable_hybrid_swa_memory",
    ),
    Entry(
        "models here read text alone, and a request with something else is refused",
        "enable_multimodal mm_attention_backend mm_enable_dp_encoder mm_feature_transport"
        " mm_global_cache_backend mm_io_worker_num mm_preprocess_cache_size_mb mm_process_config"
        " mm_processor_worker_num enable_mm_global_cache enable_prefix_mm_cache"
        " enable_broadcast_mm_inputs_process disable_fast_image_processor image_processor_backend"
        " enable_precise_embedding_interpolation trust_mm_content_hashes allowed_media_domains"
        " limit_mm_data_per_request media_url_max_file_size_mb asr_max_buffer_seconds"
        " asr_max_concurrent_sessions",
    ),
    Entry(
        "drafts are accepted where they are the model's own draw, so outputs follow its"
        " distribution",
        "speculative_use_rejection_sampling speculative_use_block_verification",
    ),
    Entry(
        "only DSPARK and variants of DFLASH read it, which are not here",
        "speculative_domino_candidate_pool_size speculative_dspark_block_size"
        " speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_sps_table_path"
        " speculative_dspark_confidence_sts_path",
    ),
    Entry(
        "the draft model is read from safetensors",
        "speculative_draft_load_format",
        ("auto", "safetensors"),
    ),
    Entry(
        "KV of a draft model has the draft model's type",
        "speculative_draft_kv_cache_dtype",
        ("auto",),
    ),
)

_ONE_DEVICE = "start one server per device behind a router"
_GIVE_WEIGHTS = "bring the weights as safetensors in float32, bfloat16 or float16"
_DRAFTERS = (
    "use EAGLE3 or EAGLE with a head, STANDALONE with a smaller model, or NGRAM, which needs"
    " neither"
)
_ON_POLICY = (
    "leave it out: --enable-deterministic-inference gives the same tokens in any company, and a"
    " trainer's own kernels round in their own way"
)

_REFUSED = (
    Entry(
        "leave it out: an Engine, or a server that a program starts, is one server, and on its"
        " command line `sglang serve` starts several and a router (docs/scaling.md)",
        "dp_size",
    ),
    Entry(
        _ONE_DEVICE,
        "pp_size ep_size nnodes node_rank attn_dp_size attn_cp_size dcp_size"
        " moe_dp_size dwdp_size enable_prefill_cp use_ray",
    ),
    Entry(
        "leave it out: one server fills prompts and decodes",
        "disaggregation_mode encoder_only language_only enable_pdmux",
    ),
    Entry(
        _GIVE_WEIGHTS,
        "quantization_param_path quantize_and_serve torchao_config modelopt_quant"
        " modelopt_checkpoint_restore_path modelopt_checkpoint_save_path modelopt_export_path"
        " rl_quant_profile speculative_draft_model_quantization",
    ),
    Entry(
        f"{_GIVE_WEIGHTS}, or in fp8",
        "quantization",
        (
            *("awq", "awq_marlin", "gptq", "gptq_marlin", "bitsandbytes", "gguf", "modelopt"),
            *(
                "modelopt_fp4",
                "modelopt_fp8",
                "mxfp4",
                "mxfp8",
                "marlin",
                "moe_wna16",
                "petit_nvfp4",
            ),
            *("qoq", "w4afp8", "w8a8_fp8", "w8a8_int8", "auto-round", "blockwise_int8"),
        ),
    ),
    Entry(
        _GIVE_WEIGHTS,
        "load_format",
        (
            *("gguf", "pt", "npcache", "sharded_state", "presharded", "bitsandbytes", "mistral"),
            *("expert_pack", "flash_rl", "layered", "instanttensor", "private"),
        ),
    ),
    Entry(
        "bring the folder to this host, and send new weights by /update_weights_from_distributed"
        " or /update_weights_from_tensor",
        "load_format",
        ("remote", "remote_instance"),
    ),
    Entry(
        "write a safetensors folder for --model-path",
        "custom_weight_loader modelexpress_config model_config_parser",
    ),
    Entry(
        "use --hidden-states-folder, and --hidden-states-layers to name layers",
        "enable_return_aux_hidden_states return_aux_hidden_state_layer_ids",
    ),
    Entry("change the folder's config.json", "json_model_override_args decrypted_config_file"),
    Entry(
        "start with the weights there are, send the new ones by /update_weights_from_*, then the"
        " requests",
        "checkpoint_engine_wait_weights_before_ready",
    ),
    Entry(
        "leave it out: KV has the type of --dtype, since attention over KV of 8 bits is not built;"
        " a lower --mem-fraction-static or --max-total-tokens makes its pool smaller",
        "kv_cache_dtype speculative_draft_kv_cache_dtype",
    ),
    Entry(
        "leave it out: KV of earlier requests stays on the device as long as there is room",
        "enable_hierarchical_cache enable_lmcache enable_flexkv hicache_storage_backend"
        " radix_cache_backend hicache_size hicache_ratio enable_unified_memory",
    ),
    Entry(
        "lower --context-length or --mem-fraction-static, or take a smaller model",
        "cpu_offload_gb offload_group_size kt_weight_path",
    ),
    Entry(
        "merge the adapter into the weights",
        "enable_lora lora_paths",
    ),
    Entry(
        f"use NEXTN with a model's own layer for multi-token prediction; else {_DRAFTERS}",
        "speculative_algorithm",
        ("MTP", "FROZEN_KV_MTP"),
    ),
    Entry(
        f"no drafter here corrects blocks by a Markov head; {_DRAFTERS}",
        "speculative_algorithm",
        ("DSPARK",),
    ),
    Entry(_DRAFTERS, "speculative_algorithm", ("PHOENIX", "UNO")),
    Entry(
        "use --speculative-algorithm EAGLE3 or EAGLE, whose head drafts all steps",
        "enable_multi_layer_eagle",
    ),
    Entry(
        "leave it out; --attention-backend triton is for GPUs of NVIDIA, torch_native for any CPU",
        "attention_backend",
        ("aiter", "wave", "ascend", "intel_xpu"),
    ),
    Entry(
        "leave it out: no model here has latent or sparse attention, or chunks of its own",
        "attention_backend",
        (
            *("dsa", "nsa", "qsa", "dsv4", "compressed", "dual_chunk_flash_attn"),
            *("llada2_cfg_flashinfer", "minicpm_flashattn", "minicpm_flashinfer"),
        ),
    ),
    Entry(_ON_POLICY, "rl_on_policy_target"),
    Entry("use --enable-priority-scheduling", "schedule_policy", ("priority",)),
    Entry("give a large --priority-scheduling-preemption-threshold", "disable_priority_preemption"),
    Entry(
        "use a server of embeddings; this runtime generates text",
        "is_embedding prefill_only_disable_kv_cache",
    ),
    Entry(
        "use `logit_bias`, or a grammar (docs/structured_outputs.md)",
        "enable_custom_logit_processor",
    ),
    Entry(
        "leave it out: it is not told which experts or entries a layer chose",
        "enable_return_routed_experts enable_return_indexer_topk",
    ),
    Entry(
        "leave it out: /generate streams the text so far, /v1/completions and /v1/chat/completions"
        " the new pieces",
        "stream_output incremental_streaming_output",
    ),
    Entry(
        "ask for shorter prompts, or raise --context-length; `max_new_tokens` that a request does"
        " not give already fits itself",
        "allow_auto_truncate",
    ),
    Entry(
        "use a proxy in front",
        "ssl_certfile ssl_keyfile ssl_keyfile_password ssl_ca_certs enable_ssl_refresh"
        " enable_http2 fastapi_root_path",
    ),
    Entry(
        "use HTTP; requests go to /generate or /v1/*",
        "grpc_mode smg_grpc_mode grpc_port",
    ),
    Entry(
        "a command line takes it; Engine and ServerArgs read no file, so give each flag as an"
        " argument",
        "config",
    ),
)

TABLE: dict[str, tuple[Entry, ...]] = {
    "works": _WORKS,
    "no effect here": _NO_EFFECT,
    "refused": _REFUSED,
}
