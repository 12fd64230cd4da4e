// Choose the next token of each row of logits. The torch reference in kernels/sampling.py defines
// what is chosen; this finds the same token with two or three passes over a row.
//
// Same token as the reference: penalties, bias and the line below which no token can win are
// computed in float32, scores and noise in double, by the same sequence of roundings; a product that
// the compiler might fuse with a sum goes through `rounded`. What may differ in the last bits of a
// double is the logarithm of the noise (libm here, a vector library in torch) and the order in which
// probabilities are summed for top_p. So two tokens can change places only where their scores, or a
// cumulated probability and top_p, agree to about 15 digits.
//
// A row's maximum is kept per block of 128 tokens. It tells which blocks can hold anything above a
// given line, and bounds the k-th largest logit from below. Nothing is sorted but the k best, or the
// few tokens around the cut of top_p.

#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

// One copy per instruction set, chosen when the library is loaded.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GLIBC__) && !defined(__clang__)
#define PF_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PF_CLONES
#endif

namespace {

constexpr int64_t BLOCK = 128;
constexpr int32_t BUCKETS = 2048;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15ULL;
constexpr float INF = std::numeric_limits<float>::infinity();

template <class To, class From>
inline To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To result;
  std::memcpy(&result, &value, sizeof result);
  return result;
}

// Keeps a product from being fused into an FMA, which would round differently from torch.
inline float rounded(float value) {
  volatile float stored = value;
  return stored;
}

// Order of floats as an order of integers; -0 and 0 are equal, NaN is beyond the infinities.
inline int32_t key_of(float value) {
  const int32_t bits = bits_as<int32_t>(value);
  return bits < 0 ? static_cast<int32_t>(0x80000000U - static_cast<uint32_t>(bits)) : bits;
}

inline float of_key(int32_t key) {
  return bits_as<float>(key < 0 ? static_cast<int32_t>(0x80000000U - static_cast<uint32_t>(key))
                                : key);
}

inline uint64_t finalise(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  return z ^ (z >> 31);
}

// Which of BUCKETS a logit falls into, the best ones first. Never decreases as x falls.
inline int32_t bucket_of(float x, float best, float fineness) {
  const float place = (best - x) * fineness;
  return static_cast<int32_t>(place < BUCKETS - 1 ? place : BUCKETS - 1.0f);
}

// exp(x) for x <= 0 with an error of about one unit in the last place; 0 below -700.
// 2^k * exp(r) with |r| <= ln 2 / 2; the series' next term is below 5e-18.
inline double exp_of_negative(double x) {
  const double bounded = x < -700.0 ? -700.0 : x;
  const double shifted = bounded * 1.4426950408889634 + 0x1.8p52;  // k in the low bits
  const double k = shifted - 0x1.8p52;
  const double r = (bounded - k * 0x1.62e42fefa38p-1) - k * 0x1.ef35793c7673p-45;
  double p = 1.0 / 6227020800.0;
  p = p * r + 1.0 / 479001600.0;
  p = p * r + 1.0 / 39916800.0;
  p = p * r + 1.0 / 3628800.0;
  p = p * r + 1.0 / 362880.0;
  p = p * r + 1.0 / 40320.0;
  p = p * r + 1.0 / 5040.0;
  p = p * r + 1.0 / 720.0;
  p = p * r + 1.0 / 120.0;
  p = p * r + 1.0 / 24.0;
  p = p * r + 1.0 / 6.0;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  const double power = bits_as<double>((bits_as<uint64_t>(shifted) + 1023) << 52);
  return x < -700.0 ? 0.0 : p * power;
}

// Largest key of each block; true when no entry is NaN.
PF_CLONES bool block_keys(const float *row, int64_t vocab, int32_t *keys) {
  uint32_t any_nan = 0;
  for (int64_t first = 0; first < vocab; first += BLOCK) {
    const int64_t count = std::min(BLOCK, vocab - first);
    int32_t best = std::numeric_limits<int32_t>::min();
    for (int64_t j = 0; j < count; ++j) {
      const int32_t key = key_of(row[first + j]);
      best = key > best ? key : best;
      any_nan |= (bits_as<uint32_t>(row[first + j]) & 0x7fffffffU) > 0x7f800000U;
    }
    keys[first / BLOCK] = best;
  }
  return any_nan == 0;
}

// Sum of exp(x - best).
PF_CLONES double sum_of_exp(const float *row, int64_t vocab, float best) {
  double parts[8] = {};
  for (int64_t first = 0; first < vocab; first += BLOCK) {
    const int64_t count = std::min(BLOCK, vocab - first);
    double terms[BLOCK] = {};
    for (int64_t j = 0; j < count; ++j)
      terms[j] = exp_of_negative(static_cast<double>(row[first + j]) - best);
    for (int64_t j = 0; j < BLOCK; j += 8)
      for (int64_t i = 0; i < 8; ++i) parts[i] += terms[j + i];
  }
  double sum = 0;
  for (double part : parts) sum += part;
  return sum;
}

// exp((x - best) / temperature) of the entries >= line, summed by `bucket_of` x.
PF_CLONES void weigh(const float *row, int64_t vocab, const int32_t *keys, float best,
                     double temperature, float line, float fineness, double *weights) {
  const int32_t line_key = key_of(line);
  for (int64_t first = 0; first < vocab; first += BLOCK) {
    if (keys[first / BLOCK] < line_key) continue;
    const int64_t count = std::min(BLOCK, vocab - first);
    const float *x = row + first;
    double terms[BLOCK];
    int32_t buckets[BLOCK];
    for (int64_t j = 0; j < count; ++j)
      terms[j] = exp_of_negative((static_cast<double>(x[j]) - best) / temperature);
    for (int64_t j = 0; j < count; ++j) terms[j] = x[j] >= line ? terms[j] : 0.0;
    for (int64_t j = 0; j < count; ++j) buckets[j] = bucket_of(x[j], best, fineness);
    for (int64_t j = 0; j < count; ++j) weights[buckets[j]] += terms[j];
  }
}

// Upper bounds of score + noise for `count` tokens from `first`; returns whether one reaches `line`.
//
// g = -ln(-ln u) <= -ln(1 - u), and log2 is at least its chord between powers of two, which is what
// the bits of a float read as an integer give. Too high by at most 0.06 + (-ln(1 - u) - g).
PF_CLONES bool bound_block(const float *x, int64_t first, int64_t count, uint64_t key, float best,
                           float inverse, float line, float *bounds) {
  uint32_t complement[BLOCK];
  for (int64_t j = 0; j < count; ++j) {
    const uint64_t id = static_cast<uint64_t>(first + j);
    complement[j] = ~static_cast<uint32_t>(finalise(key + id * GOLDEN) >> 32);
  }
  uint32_t any = 0;
  for (int64_t j = 0; j < count; ++j) {
    const float half = static_cast<float>(static_cast<int32_t>(complement[j] >> 1));
    const float log2_of_it = static_cast<float>(bits_as<int32_t>(half)) * 0x1p-23f - 126.0f;
    const float noise = 0.69314718f * (32.0f - log2_of_it);
    bounds[j] = (x[j] - best) * inverse + noise;
    any |= bounds[j] >= line;
  }
  return any != 0;
}

// Standard Gumbel noise of one token.
double gumbel(uint64_t key, int32_t id) {
  const uint64_t bits = finalise(key + static_cast<uint64_t>(id) * GOLDEN) >> 32;
  return -std::log(-std::log((static_cast<double>(bits) + 0.5) * 0x1p-32));
}

struct Candidate {
  double score;
  int32_t id;
};

bool before_in_rank(const Candidate &a, const Candidate &b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// One row on its way to a token. Scratch memory is kept from row to row.
class Row {
 public:
  void sample(float *logits, int64_t vocab, const pf_sample_params &params, pf_sampled &out,
              int32_t *top_ids, float *top_logprobs) {
    x_ = logits;
    vocab_ = vocab;
    params_ = &params;
    out = {-1, adjust(), 0, 0.0f};
    const bool finite = scan();
    if (!finite) out.status = PF_NON_FINITE;
    if (out.status != PF_SAMPLED) return;
    const bool greedy = params.temperature <= 0 || params.top_k == 1;
    out.token = greedy ? best_id() : draw();
    if (params.num_logprobs >= 0) logprobs(out, top_ids, top_logprobs);
  }

 private:
  bool is_known(int32_t id) const { return id >= 0 && id < vocab_; }

  // Penalties, bias and masks in place.
  int32_t adjust() {
    const pf_sample_params &p = *params_;
    if (p.repetition_penalty != 1.0f) {
      const float r = p.repetition_penalty;
      for (int64_t i = 0; i < p.num_seen; ++i) {
        if (!is_known(p.seen_ids[i])) continue;
        float &score = x_[p.seen_ids[i]];
        score = rounded(score > 0 ? score / r : score * r);
      }
    }
    if (p.presence_penalty != 0 || p.frequency_penalty != 0) {
      for (int64_t i = 0; i < p.num_seen; ++i) {
        if (p.output_counts[i] == 0 || !is_known(p.seen_ids[i])) continue;
        const float by_count = rounded(p.frequency_penalty * static_cast<float>(p.output_counts[i]));
        x_[p.seen_ids[i]] -= by_count + p.presence_penalty;
      }
    }
    for (int64_t i = 0; i < p.num_biased; ++i) {
      if (!is_known(p.bias_ids[i])) return PF_BAD_BIAS;
      x_[p.bias_ids[i]] += p.bias_values[i];
    }
    int32_t status = PF_SAMPLED;
    for (int64_t i = 0; i < p.num_masked; ++i) {
      if (!is_known(p.masked_ids[i])) continue;
      float &score = x_[p.masked_ids[i]];
      if (!(score < INF)) status = PF_NON_FINITE;  // a mask must not hide a broken row
      score = -INF;
    }
    return status;
  }

  // Finds the best logit; false when the row is not usable.
  bool scan() {
    keys_.resize((vocab_ + BLOCK - 1) / BLOCK);
    if (keys_.empty()) return false;
    const bool finite = block_keys(x_, vocab_, keys_.data());
    const auto best = std::max_element(keys_.begin(), keys_.end());
    best_block_ = best - keys_.begin();
    best_ = of_key(*best);
    return finite && std::isfinite(best_);
  }

  int32_t best_id() const {
    int64_t id = best_block_ * BLOCK;
    while (x_[id] != best_) ++id;
    return static_cast<int32_t>(id);
  }

  double score(int32_t id) const {
    return (static_cast<double>(x_[id]) - best_) / params_->temperature;
  }

  double weight(int32_t id) const { return exp_of_negative(score(id)); }

  // The highest line above which at least `count` entries lie for sure.
  float line_for(int64_t count) {
    if (count > static_cast<int64_t>(keys_.size())) return -FLT_MAX;
    sorted_keys_ = keys_;
    const auto nth = sorted_keys_.begin() + (count - 1);
    std::nth_element(sorted_keys_.begin(), nth, sorted_keys_.end(), std::greater<int32_t>());
    return std::max(of_key(*nth), -FLT_MAX);
  }

  // The `count` best entries >= line, best first, the lower id first among equals.
  void take_best(int64_t count, float line) {
    line = std::max(line, line_for(count));
    candidates_.clear();
    for (int64_t first = 0; first < vocab_; first += BLOCK) {
      if (keys_[first / BLOCK] < key_of(line)) continue;
      const int64_t end = std::min(first + BLOCK, vocab_);
      for (int64_t id = first; id < end; ++id)
        if (x_[id] >= line) candidates_.push_back({x_[id], static_cast<int32_t>(id)});
    }
    if (static_cast<int64_t>(candidates_.size()) > count) {
      std::nth_element(candidates_.begin(), candidates_.begin() + count, candidates_.end(), before_in_rank);
      candidates_.resize(count);
    }
    std::sort(candidates_.begin(), candidates_.end(), before_in_rank);
  }

  int32_t draw() {
    const pf_sample_params &p = *params_;
    const double lowest = best_ - p.span;
    const float line = static_cast<float>(std::max(lowest, -static_cast<double>(FLT_MAX)));
    key_ = finalise(p.seed + finalise(p.position + 1 + GOLDEN) + GOLDEN);
    if (p.top_k > 0 && p.top_k < vocab_) {
      take_best(p.top_k, line);
      double total = 0;
      for (const Candidate &c : candidates_) total += weight(c.id);
      if (p.top_p < 1.0) cut_at_top_p(0, total);
      return draw_from_candidates();
    }
    return p.top_p < 1.0 ? draw_from_row(last_of_nucleus(line))
                         : draw_from_row({line, static_cast<int32_t>(vocab_)});
  }

  // Keeps the fewest candidates, at least one, that with the weight `before` them hold top_p of
  // `total`.
  void cut_at_top_p(double before, double total) {
    double share = before / total;
    for (size_t i = 0; i < candidates_.size(); ++i) {
      if (i > 0 && !(share < params_->top_p)) return candidates_.resize(i);
      share += weight(candidates_[i].id) / total;
    }
  }

  // The least likely token that top_p keeps. Only the bucket in which the cut falls is sorted.
  Candidate last_of_nucleus(float line) {
    weights_.assign(BUCKETS, 0.0);
    const double finest = std::min(BUCKETS / params_->span, 1e30);
    const float fineness = static_cast<float>(finest);
    weigh(x_, vocab_, keys_.data(), best_, params_->temperature, line, fineness, weights_.data());
    double total = 0, before = 0;
    for (double weight : weights_) total += weight;
    int32_t cut = 0;  // the last bucket that begins before the limit and holds anything
    for (int32_t bucket = 1; bucket < BUCKETS; ++bucket) {
      if (weights_[bucket] == 0) continue;
      if (!((before + weights_[cut]) / total < params_->top_p)) break;
      before += weights_[cut];
      cut = bucket;
    }
    candidates_.clear();
    for (int64_t first = 0; first < vocab_; first += BLOCK) {
      if (bucket_of(of_key(keys_[first / BLOCK]), best_, fineness) > cut) continue;
      const int64_t end = std::min(first + BLOCK, vocab_);
      for (int64_t id = first; id < end; ++id)
        if (x_[id] >= line && bucket_of(x_[id], best_, fineness) == cut)
          candidates_.push_back({x_[id], static_cast<int32_t>(id)});
    }
    std::sort(candidates_.begin(), candidates_.end(), before_in_rank);
    cut_at_top_p(before, total);
    return candidates_.back();
  }

  int32_t draw_from_candidates() const {
    Candidate winner{-std::numeric_limits<double>::infinity(), candidates_[0].id};
    for (const Candidate &c : candidates_) {
      const double value = score(c.id) + gumbel(key_, c.id);
      if (value > winner.score) winner = {value, c.id};
    }
    return winner.id;
  }

  // Over all entries down to `last` in rank. Noise costs two logarithms, so it is computed only for
  // tokens whose upper bound reaches the best value so far. The margin covers the bounds' rounding.
  int32_t draw_from_row(const Candidate &last) {
    const float line = static_cast<float>(last.score);
    const float inverse = static_cast<float>(std::min(1.0 / params_->temperature, 1e30));
    Candidate winner{score(best_id()) + gumbel(key_, best_id()), best_id()};
    float bounds[BLOCK];
    for (int64_t first = 0; first < vocab_; first += BLOCK) {
      if (keys_[first / BLOCK] < key_of(line)) continue;
      const int64_t count = std::min(BLOCK, vocab_ - first);
      const float reach = static_cast<float>(winner.score) - 1e-3f;
      if (!bound_block(x_ + first, first, count, key_, best_, inverse, reach, bounds)) continue;
      for (int64_t j = 0; j < count; ++j) {
        const int32_t id = static_cast<int32_t>(first + j);
        if (bounds[j] < reach || x_[id] < line || (x_[id] == line && id > last.id)) continue;
        const double value = score(id) + gumbel(key_, id);
        if (value > winner.score || (value == winner.score && id < winner.id)) winner = {value, id};
      }
    }
    return winner.id;
  }

  void logprobs(pf_sampled &out, int32_t *top_ids, float *top_logprobs) {
    const double log_total = std::log(sum_of_exp(x_, vocab_, best_));
    const auto logprob = [&](int32_t id) {
      return static_cast<float>(static_cast<double>(x_[id]) - best_ - log_total);
    };
    out.logprob = logprob(out.token);
    if (params_->num_logprobs == 0) return;
    take_best(std::min<int64_t>(params_->num_logprobs, vocab_), -FLT_MAX);
    for (const Candidate &c : candidates_) {
      top_ids[out.num_top] = c.id;
      top_logprobs[out.num_top++] = logprob(c.id);
    }
  }

  float *x_ = nullptr;
  int64_t vocab_ = 0;
  const pf_sample_params *params_ = nullptr;
  float best_ = 0;
  int64_t best_block_ = 0;
  uint64_t key_ = 0;
  std::vector<int32_t> keys_, sorted_keys_;
  std::vector<double> weights_;
  std::vector<Candidate> candidates_;
};

}  // namespace

void pf_sample(float *logits, int64_t rows, int64_t vocab, int64_t stride,
               const pf_sample_params *params, pf_sampled *out, int32_t *top_ids,
               float *top_logprobs, int64_t max_top) {
  static thread_local Row row;
  for (int64_t r = 0; r < rows; ++r)
    row.sample(logits + r * stride, vocab, params[r], out[r], top_ids + r * max_top,
               top_logprobs + r * max_top);
}
