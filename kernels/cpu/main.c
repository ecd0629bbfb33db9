/* The C side of localllm's CPU kernels: one translation unit, compiled for one instruction set by build.py. */
#include "vec.h"

#include "pool.h"
#include "weight.h"
#include "pack.h"
#include "activations.h"
#include "matmul.h"
#include "amx_check.h"
#include "attention.h"
#include "ops.h"
#include "recurrent.h"
#include "select.h"
#include "segments.h"
#include "latent.h"
#include "compressed.h"
#include "hyper.h"

/* ABI check value for the loader: struct sizes and CPU features. */
int64_t ll_abi(void)
{
    int64_t sizes = sizeof(ll_weight) + sizeof(ll_attention_layer) + sizeof(ll_mlp_layer) + sizeof(ll_experts_layer) + sizeof(ll_decoder_layer) +
                    sizeof(ll_head_layer) + sizeof(ll_latent_layer) + sizeof(ll_delta_layer) + sizeof(ll_conv_layer) + sizeof(ll_mamba_layer) + sizeof(ll_state_slots) + sizeof(ll_sequences) +
                    sizeof(ll_attention_args) + sizeof(ll_step) + sizeof(ll_pass) + sizeof(ll_adapters) + sizeof(ll_low_rank) + sizeof(ll_hyper_layer) +
                    sizeof(ll_compressed_layer) + sizeof(ll_entry_step);
    return sizes << 32 | (int64_t)VW << 8 | LL_VNNI;
}
