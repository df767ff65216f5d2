#include "digest_launch.h"

#include <algorithm>
#include <type_traits>

namespace shardinit {
namespace {

constexpr uint64_t kSlotBytes = 16;
constexpr uint64_t kBlockBytes = 16;
constexpr uint64_t kLeast = 8 * kWarpThreads;  // blocks or elements of a span: worth a slot
constexpr uint64_t kWarpsPerProcessor = 64;    // spans that all pieces together have for a multiprocessor, about
constexpr uint64_t kMostSpan = uint64_t{1} << 30;

bool is_run(const DigestPiece& piece) {
  const Axis& only = piece.grid.axis[0];
  return piece.grid.num_axes == 1 && (only.size == 1 || (only.stride == 1 && only.step == 1)) &&
         reinterpret_cast<uint64_t>(piece.data) % std::min(piece.size, 4u) == 0;
}

uint64_t round_up(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

DigestRunPiece run_of(const DigestPiece& piece) {
  const uint32_t size = std::min(piece.size, 4u);  // of a word
  const uint64_t words = piece.size / size;
  const auto address = reinterpret_cast<uint64_t>(piece.data);
  DigestRunPiece run{};
  run.size = size;
  run.begin = address % kBlockBytes / size;
  run.end = run.begin + static_cast<uint64_t>(piece.grid.numel()) * words;
  run.origin = address - run.begin * size;
  run.first = piece.grid.first * words - run.begin;
  return run;
}

uint64_t units_of(const DigestRunPiece& run) { return (run.end * run.size + kBlockBytes - 1) / kBlockBytes; }

// One kernel's launches, with as many pieces in each as there is room for.
template <class Batch>
struct Open {
  uint64_t slots;
  uint32_t span;
  const std::function<void(const DigestLaunch&)>& emit;
  uint64_t* num_slots;
  Batch batch{};
  uint32_t used_axes = 0;

  void add(typename Batch::Piece piece, uint64_t units, std::pair<uint64_t, uint64_t>* of_piece) {
    piece.first_span = batch.header.total;
    batch.pieces[batch.header.num_pieces++] = piece;
    const uint64_t spans = (units + span - 1) / span;
    batch.header.total += spans;
    of_piece->first = *num_slots;
    *num_slots += spans * kWarpThreads;
    of_piece->second = *num_slots;
  }

  void flush() {
    if (batch.header.num_pieces) {
      const uint64_t total = batch.header.total;
      batch.header.slots = slots + (*num_slots - total * kWarpThreads) * kSlotBytes;
      batch.header.span = span;
      constexpr uint64_t kWarps = kThreads / kWarpThreads;
      const uint64_t grid = std::min<uint64_t>(0x7fffffff, (total + kWarps - 1) / kWarps);
      emit({std::is_same_v<Batch, DigestRunBatch>, static_cast<uint32_t>(grid), &batch, sizeof(batch)});
    }
    batch = Batch{};
    used_axes = 0;
  }
};

}  // namespace

DigestSlots plan_digest(const DigestPiece* pieces, size_t num_pieces, uint32_t num_multiprocessors, uint64_t slots,
                        const std::function<void(const DigestLaunch&)>& emit) {
  DigestSlots result{0, std::vector<std::pair<uint64_t, uint64_t>>(num_pieces)};
  uint64_t run_units = 0, grid_units = 0;
  for (size_t k = 0; k < num_pieces; ++k) {
    if (is_run(pieces[k])) {
      run_units += units_of(run_of(pieces[k]));
    } else {
      grid_units += static_cast<uint64_t>(pieces[k].grid.numel());
    }
  }
  const auto span_of = [&](uint64_t units) {
    const uint64_t share = round_up(units / (kWarpsPerProcessor * num_multiprocessors) + 1, kWarpThreads);
    return static_cast<uint32_t>(std::clamp(share, kLeast, kMostSpan));
  };
  Open<DigestRunBatch> runs{slots, span_of(run_units), emit, &result.num_slots};
  for (size_t k = 0; k < num_pieces; ++k) {
    if (!is_run(pieces[k]) || !pieces[k].grid.numel()) continue;
    if (runs.batch.header.num_pieces == DigestRunBatch::kMaxPieces) runs.flush();
    const DigestRunPiece run = run_of(pieces[k]);
    runs.add(run, units_of(run), &result.of_piece[k]);
  }
  runs.flush();
  Open<DigestGridBatch> grids{slots, span_of(grid_units), emit, &result.num_slots};
  for (size_t k = 0; k < num_pieces; ++k) {
    const DigestPiece& piece = pieces[k];
    if (is_run(piece) || !piece.grid.numel()) continue;
    const auto num_axes = static_cast<uint32_t>(piece.grid.num_axes);
    if (grids.batch.header.num_pieces == DigestGridBatch::kMaxPieces ||
        grids.used_axes + num_axes > DigestGridBatch::kMaxAxes) {
      grids.flush();
    }
    DigestGridPiece grid{};
    grid.data = reinterpret_cast<uint64_t>(piece.data);
    grid.first = piece.grid.first;
    grid.numel = static_cast<uint64_t>(piece.grid.numel());
    grid.size = piece.size;
    grid.first_axis = grids.used_axes;
    grid.num_axes = num_axes;
    // Neighbouring threads read near each other: the axis of the least stride goes last.
    Axis* const axes = grids.batch.axes + grids.used_axes;
    std::copy(piece.grid.axis, piece.grid.axis + num_axes, axes);
    std::stable_sort(axes, axes + num_axes, [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
    grids.used_axes += num_axes;
    grids.add(grid, grid.numel, &result.of_piece[k]);
  }
  grids.flush();
  return result;
}

}  // namespace shardinit
