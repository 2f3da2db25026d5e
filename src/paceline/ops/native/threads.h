// The threads of torch's own pool.
#pragma once

namespace paceline {

// Runs `work` on up to `threads` threads at once; it takes its share by itself, from a counter in `data`.
void on_threads(void (*work)(void*), void* data, int threads);

}  // namespace paceline
