"""Names in checkpoints: dtypes of stored experts, and keys of removed options."""

# Dtypes of the experts in a sharded checkpoint, besides their own.
EXPERT_DTYPES = ("bf16", "int8", "int4")

# Keys of removed options, and the reason. A checkpoint that holds them opens as if it did not.
RETIRED = {
    "moe_kernel_tuning_seconds": "tile sizes of kernels come from a table",
    "distill_top_k": "the teacher's whole distribution is used",
    "distill_logits": "the teacher is in memory",
    "cmcl_teach_router": "only ensembles learn by CMCL",
    "image_errors": "an unreadable image ends the run",
    "swin_attention_dropout": "no published model has it",
    "moe_log_layers": "the JSON log has the values of layers and experts",
}
