// The C interface of sampling; kernels/sampling_native.py mirrors these structs.
#pragma once

#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {

// How to choose the token of one row. Meaning and order of the steps: kernels/sampling.py.
typedef struct {
  double temperature;  // 0: the best token
  double span;         // logits further than this below the best one cannot be chosen
  double top_p;
  uint64_t seed;
  uint64_t position;  // index of the sampled token in its sequence
  int64_t top_k;      // 0: off
  const int32_t *seen_ids;       // [num_seen]: distinct tokens of prompt and output
  const int32_t *output_counts;  // [num_seen]: how often each is in the output
  int64_t num_seen;
  const int32_t *bias_ids;  // [num_biased]
  const float *bias_values;
  int64_t num_biased;
  const int32_t *masked_ids;  // [num_masked]; those beyond the vocabulary are ignored
  int64_t num_masked;
  float repetition_penalty, presence_penalty, frequency_penalty;
  int32_t num_logprobs;  // -1: none; k: the chosen token's and the k most likely ones'
} pf_sample_params;

enum pf_sample_status { PF_SAMPLED = 0, PF_NON_FINITE = 1, PF_BAD_BIAS = 2 };

typedef struct {
  int32_t token;  // -1 unless PF_SAMPLED
  int32_t status;
  int32_t num_top;
  float logprob;
} pf_sampled;

// logits [rows, vocab] with `stride` floats between rows; overwritten. top_ids, top_logprobs:
// [rows, max_top], filled up to `num_top` of each row.
void pf_sample(float *logits, int64_t rows, int64_t vocab, int64_t stride,
               const pf_sample_params *params, pf_sampled *out, int32_t *top_ids,
               float *top_logprobs, int64_t max_top);
}
#pragma GCC visibility pop
