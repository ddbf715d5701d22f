// SPDX-License-Identifier: Apache-2.0
#include <spillway/core/error.hpp>

#include <doctest/doctest.h>

#include <new>
#include <stdexcept>
#include <string>

#include "../../bench/error_message.hpp"

TEST_SUITE("replay") {
  TEST_CASE("message_of: an allocation that fails says what is missing and what to do") {
    std::string const message = command_line::message_of(std::bad_alloc{});

    CHECK(message.find("memory of the host") != std::string::npos);
    CHECK(message.find("fewer steps") != std::string::npos);
  }

  TEST_CASE("message_of: other errors keep their words") {
    spillway::OutOfHostMemory const out_of_host_memory{100, 10, "Configure a file"};

    CHECK(std::string{"a disk is full"} ==
          command_line::message_of(std::runtime_error{"a disk is full"}));
    CHECK(std::string{out_of_host_memory.what()} == command_line::message_of(out_of_host_memory));
  }
}
