// SPDX-License-Identifier: Apache-2.0
// The one place where VMA's functions are compiled. Its virtual block calls nothing of Vulkan.
#define VMA_IMPLEMENTATION
#define VMA_STATIC_VULKAN_FUNCTIONS 0
#define VMA_DYNAMIC_VULKAN_FUNCTIONS 0
#include <vk_mem_alloc.h>
