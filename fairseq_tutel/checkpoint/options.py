"""Names in checkpoints: dtypes of stored experts, and keys of removed options."""

# Dtypes to which the experts of a sharded checkpoint can be converted.
EXPERT_DTYPES = ("bf16", "int8", "int4")

# Options that were removed and are ignored in checkpoints, each with the reason for its removal.
RETIRED = {
    "moe_kernel_tuning_seconds": "tile sizes of kernels come from a table",
    "distill_top_k": "the teacher's whole distribution is used",
    "distill_logits": "the teacher is in memory",
    "cmcl_teach_router": "only ensembles learn by CMCL",
    "moe_adaptive_file": "the tuner measures again in every run",
    "moe_sinkhorn": "it chose experts in training only",
    "moe_expert_prefetch": "the cache fills with the experts that are used",
    "moe_expert_prefetch_pairs": "the cache fills with the experts that are used",
    "image_errors": "an unreadable image ends the run",
    **dict.fromkeys(("image_mean", "image_std"), "images are normalized as ImageNet's or with 0.5"),
    **dict.fromkeys(("image_jitter", "image_erase", "image_cutmix"), "augmentation is crop, flip, mixup"),
    "swin_checkpoint_activations": "saved activations of a Swin V2 fit into memory",
    "swin_attention_dropout": "no published model has it",
    "moe_log_layers": "the JSON log has the values of layers and experts",
}
