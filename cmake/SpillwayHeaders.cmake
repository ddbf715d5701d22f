# SPDX-License-Identifier: Apache-2.0
# Lists every header of the library, grouped by the dependency that it needs beside the standard library. The
# test `header_list` fails if a header is missing here.

set(SPILLWAY_HEADERS
    spillway/arena/arena_memory.hpp
    spillway/arena/free_pieces.hpp
    spillway/arena/move_batch.hpp
    spillway/arena/move_plan.hpp
    spillway/arena/range_map.hpp
    spillway/arena/room_search.hpp
    spillway/concepts/arena.hpp
    spillway/concepts/callable_object.hpp
    spillway/concepts/codec.hpp
    spillway/concepts/compaction_policy.hpp
    spillway/concepts/device_api.hpp
    spillway/concepts/device_capabilities.hpp
    spillway/concepts/eviction_policy.hpp
    spillway/concepts/file_io_api.hpp
    spillway/concepts/fit_policy.hpp
    spillway/concepts/observer.hpp
    spillway/concepts/pager.hpp
    spillway/concepts/policy_set.hpp
    spillway/concepts/prefetch_policy.hpp
    spillway/concepts/recompute_policy.hpp
    spillway/core/bits.hpp
    spillway/core/block_heap.hpp
    spillway/core/block_list.hpp
    spillway/core/block_table.hpp
    spillway/core/config.hpp
    spillway/core/error.hpp
    spillway/core/fence.hpp
    spillway/core/growing_array.hpp
    spillway/core/host_mapping.hpp
    spillway/core/kernel.hpp
    spillway/core/owned_thread.hpp
    spillway/core/range.hpp
    spillway/core/range_table.hpp
    spillway/core/record.hpp
    spillway/core/sort.hpp
    spillway/core/stats.hpp
    spillway/core/streaming_store.hpp
    spillway/core/tensor_view.hpp
    spillway/core/types.hpp
    spillway/defrag_arena.hpp
    spillway/device/host/host_api.hpp
    spillway/device/host/host_paged_api.hpp
    spillway/device/host/page_mover.hpp
    spillway/device/sim/basic_sim_api.hpp
    spillway/device/sim/model_api.hpp
    spillway/device/sim/sim_api.hpp
    spillway/device/sim/sim_backing.hpp
    spillway/device/sim/sim_handles.hpp
    spillway/device/sim/sim_memory.hpp
    spillway/device/sim/sim_op.hpp
    spillway/device/sim/sim_options.hpp
    spillway/device/sim/sim_worker.hpp
    spillway/device_allocator.hpp
    spillway/device_share.hpp
    spillway/host/coded_parts.hpp
    spillway/host/device_scratch.hpp
    spillway/host/file_checksums.hpp
    spillway/host/host_ledger.hpp
    spillway/host/host_tier.hpp
    spillway/host/host_transfers.hpp
    spillway/host/posix_file_io.hpp
    spillway/host/ring_file_io.hpp
    spillway/host/slab_map.hpp
    spillway/host/slot_codecs.hpp
    spillway/host/slot_io.hpp
    spillway/host/staging.hpp
    spillway/host/swap_file.hpp
    spillway/host/system_file_io.hpp
    spillway/host/tier_memory.hpp
    spillway/host_swap_pool.hpp
    spillway/interop/dlpack.hpp
    spillway/interop/framework/buffer_leases.hpp
    spillway/interop/framework/codec_choice.hpp
    spillway/interop/framework/fork_handlers.hpp
    spillway/interop/framework/install_options.hpp
    spillway/interop/framework/object_order.hpp
    spillway/interop/framework/operand_leases.hpp
    spillway/interop/framework/share_arguments.hpp
    spillway/interop/leased_memory.hpp
    spillway/interop/tensorflow/step_detector.hpp
    spillway/interop/torch/context_table.hpp
    spillway/interop/torch/event_timer.hpp
    spillway/interop/torch/private_pools.hpp
    spillway/interop/torch/recipe_scratch.hpp
    spillway/interop/torch/site.hpp
    spillway/interop/torch/tensor_stats.hpp
    spillway/lease.hpp
    spillway/observe/by_start.hpp
    spillway/observe/json_stream.hpp
    spillway/observe/names.hpp
    spillway/observe/range_history.hpp
    spillway/observe/snapshot.hpp
    spillway/observe/stats_json.hpp
    spillway/observe/summary.hpp
    spillway/observe/timed_device.hpp
    spillway/observe/timeline.hpp
    spillway/page_arena.hpp
    spillway/pager/block_state.hpp
    spillway/pager/blocks.hpp
    spillway/pager/copy_streams.hpp
    spillway/pager/journal.hpp
    spillway/pager/kept_copies.hpp
    spillway/pager/leases.hpp
    spillway/pager/look_ahead.hpp
    spillway/pager/monitor.hpp
    spillway/pager/recipes.hpp
    spillway/pager/reclaimer.hpp
    spillway/pager/transfers.hpp
    spillway/policies.hpp
    spillway/policy/codec/as_bfloat16.hpp
    spillway/policy/codec/byte_planes.hpp
    spillway/policy/codec/identity.hpp
    spillway/policy/codec/kernel_slot.hpp
    spillway/policy/codec/plane_kernels.hpp
    spillway/policy/codec/stripe_kernels.hpp
    spillway/policy/codec/zero_bitmap.hpp
    spillway/policy/compaction/exchange_search.hpp
    spillway/policy/compaction/gap_index.hpp
    spillway/policy/compaction/layout_line.hpp
    spillway/policy/compaction/move_order.hpp
    spillway/policy/compaction/size_pool.hpp
    spillway/policy/compaction/sliding_compaction.hpp
    spillway/policy/compaction/window_search.hpp
    spillway/policy/eviction/absence_cover.hpp
    spillway/policy/eviction/queue_eviction.hpp
    spillway/policy/eviction/ranked_eviction.hpp
    spillway/policy/eviction/schedule_eviction.hpp
    spillway/policy/eviction/step_plan.hpp
    spillway/policy/fit/best_fit.hpp
    spillway/policy/fit/segregated_fit.hpp
    spillway/policy/null_policies.hpp
    spillway/policy/prefetch/reverse_order.hpp
    spillway/policy/prefetch/schedule_lookahead.hpp
    spillway/policy/recompute/recompute_if_cheaper.hpp
    spillway/policy/recompute/tuned_recompute.hpp
    spillway/schedule/access_schedule.hpp
    spillway/schedule/step_follower.hpp
    spillway/schedule/step_record.hpp
    spillway/schedule/use.hpp
    spillway/share/fair_shares.hpp
    spillway/share/share_table.hpp
    spillway/sim.hpp
    spillway/spillway.hpp
    spillway/stream.hpp
    spillway/stream/copy_batch.hpp
    spillway/stream/owned_stream.hpp
    spillway/stream/stream_events.hpp
    spillway/stream/stream_order.hpp
    spillway/stream_prefetcher.hpp
    spillway/swappable_buffer.hpp
    spillway/swappable_tensor.hpp
    spillway/testing/faulty_file_io.hpp
    spillway/testing/order_check.hpp
    spillway/testing/stepped_sim_api.hpp)

# doctest. Only tests include these headers.
set(SPILLWAY_DOCTEST_HEADERS
    spillway/testing/device_contracts.hpp
    spillway/testing/policy_contracts.hpp
    spillway/testing/stream_codec_contract.hpp)

# The CUDA toolkit.
set(SPILLWAY_CUDA_HEADERS
    spillway/cuda.hpp
    spillway/cuda_codecs.hpp
    spillway/device/cuda/copy_kernel.hpp
    spillway/device/cuda/cuda_api.hpp
    spillway/device/cuda/cuda_context.hpp
    spillway/device/cuda/cuda_host_worker.hpp
    spillway/device/cuda/cuda_pinned_memory.hpp
    spillway/device/cuda/cuda_virtual_memory.hpp
    spillway/observe/nvtx.hpp)

# nvcc. Compiled by their tests, if it is found.
set(SPILLWAY_NVCC_HEADERS
    spillway/cuda_kernels.cuh)

# Thrust or libcu++, from the CUDA toolkit or installed separately.
set(SPILLWAY_CCCL_HEADERS
    spillway/interop/cuda_mr.hpp
    spillway/interop/mdspan.hpp
    spillway/interop/thrust.hpp)

# nlohmann_json.
set(SPILLWAY_JSON_HEADERS)

# PyTorch. Compiled and tested only by scripts/test-pytorch.sh; headers named *cuda* need its CUDA libraries.
set(SPILLWAY_TORCH_HEADERS
    spillway/interop/torch.hpp
    spillway/interop/torch/cuda_allocator.hpp
    spillway/interop/torch/cuda_history.hpp
    spillway/interop/torch/cuda_site.hpp
    spillway/interop/torch/drawn_bits.hpp
    spillway/interop/torch/frame_hook.hpp
    spillway/interop/torch/held_storages.hpp
    spillway/interop/torch/host_site.hpp
    spillway/interop/torch/host_tensor_allocator.hpp
    spillway/interop/torch/large_model_support.hpp
    spillway/interop/torch/native_nodes.hpp
    spillway/interop/torch/operands.hpp
    spillway/interop/torch/operation_times.hpp
    spillway/interop/torch/operations.hpp
    spillway/interop/torch/random_draw.hpp
    spillway/interop/torch/recompute.hpp
    spillway/interop/torch/sending_converter.hpp
    spillway/interop/torch/site_state.hpp
    spillway/interop/torch/storage_leases.hpp
    spillway/interop/torch/storage_table.hpp
    spillway/interop/torch/torch_version.hpp
    spillway/interop/torch_cuda.hpp)

# liburing. Compiled by its test, if the library is found.
set(SPILLWAY_IO_URING_HEADERS
    spillway/host/io_uring_file_io.hpp)

# nvCOMP. Compiled by its test, if the library and nvcc are found.
set(SPILLWAY_NVCOMP_HEADERS
    spillway/nvcomp_codecs.cuh)

# cuFile. Compiled by its test, if the header is found.
set(SPILLWAY_CUFILE_HEADERS
    spillway/host/cufile_io.hpp)

# TensorFlow. Compiled and tested only by scripts/test-tensorflow.sh.
set(SPILLWAY_TENSORFLOW_HEADERS
    spillway/interop/tensorflow.hpp
    spillway/interop/tensorflow/gpu_device.hpp
    spillway/interop/tensorflow/operation.hpp
    spillway/interop/tensorflow/swapping_device.hpp
    spillway/interop/tensorflow/tensor_allocator.hpp)

# spillway_add_headers(<target> <CUDA target>): adds all headers to the targets as file sets, so that they are
# installed. The target all_verify_interface_header_sets compiles each header on its own that needs no further
# include path.
function(spillway_add_headers target cuda_target)
  set(base ${PROJECT_SOURCE_DIR}/include)
  foreach(row IN ITEMS ${target}:HEADERS:SPILLWAY_HEADERS
                       ${target}:doctest_headers:SPILLWAY_DOCTEST_HEADERS
                       ${cuda_target}:cuda_headers:SPILLWAY_CUDA_HEADERS
                       ${cuda_target}:nvcc_headers:SPILLWAY_NVCC_HEADERS
                       ${cuda_target}:nvcomp_headers:SPILLWAY_NVCOMP_HEADERS
                       ${target}:cccl_headers:SPILLWAY_CCCL_HEADERS
                       ${target}:io_uring_headers:SPILLWAY_IO_URING_HEADERS
                       ${target}:cufile_headers:SPILLWAY_CUFILE_HEADERS
                       ${target}:json_headers:SPILLWAY_JSON_HEADERS
                       ${target}:torch_headers:SPILLWAY_TORCH_HEADERS
                       ${target}:tensorflow_headers:SPILLWAY_TENSORFLOW_HEADERS)
    string(REPLACE ":" ";" row ${row})
    list(GET row 0 owner)
    list(GET row 1 set)
    list(GET row 2 variable)
    list(TRANSFORM ${variable} PREPEND ${base}/ OUTPUT_VARIABLE files)
    target_sources(${owner} INTERFACE FILE_SET ${set} TYPE HEADERS BASE_DIRS ${base} FILES ${files})
  endforeach()

  set_target_properties(${target} PROPERTIES VERIFY_INTERFACE_HEADER_SETS ${PROJECT_IS_TOP_LEVEL}
                                             INTERFACE_HEADER_SETS_TO_VERIFY HEADERS)
  if(SPILLWAY_HAS_CUDA)
    set_target_properties(${cuda_target} PROPERTIES VERIFY_INTERFACE_HEADER_SETS ${PROJECT_IS_TOP_LEVEL}
                                                    INTERFACE_HEADER_SETS_TO_VERIFY cuda_headers)
  endif()
endfunction()
