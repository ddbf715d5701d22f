// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

#include "data.hpp"
#include <unistd.h>

namespace {

namespace fs = std::filesystem;
using beyond::DataError;
using beyond::load_dataset;

/// A temporary folder, removed by the destructor.
class Folder {
 public:
  Folder() {
    std::string name = (fs::temp_directory_path() / "train_data_test_XXXXXX").string();
    REQUIRE(mkdtemp(name.data()) != nullptr);
    path_ = name;
  }
  Folder(Folder const&) = delete;
  Folder& operator=(Folder const&) = delete;
  ~Folder() { fs::remove_all(path_); }

  fs::path write(std::string const& name, std::string const& bytes) const {
    std::ofstream{path_ / name, std::ios::binary} << bytes;
    return path_ / name;
  }
  [[nodiscard]] fs::path const& path() const { return path_; }

 private:
  fs::path path_;
};

std::string idx(std::initializer_list<std::uint32_t> extents, std::string const& data) {
  std::string bytes{'\0', '\0', '\x08', static_cast<char>(extents.size())};
  for (std::uint32_t const extent : extents) {
    for (unsigned const shift : {24U, 16U, 8U, 0U}) {
      bytes += static_cast<char>(extent >> shift & 0xFFU);
    }
  }
  return bytes + data;
}

/// Three pictures of 2 x 2 pixels to learn from and one for the test.
void write_mnist(Folder const& folder) {
  folder.write("train-images-idx3-ubyte",
               idx({3, 2, 2}, std::string{"\x00\xFF\x33\x66\x01\x02\x03\x04\x05\x06\x07\x08", 12}));
  folder.write("train-labels-idx1-ubyte", idx({3}, std::string{"\x07\x00\x09", 3}));
  folder.write("t10k-images-idx3-ubyte", idx({1, 2, 2}, std::string{"\x00\x00\x00\xFF", 4}));
  folder.write("t10k-labels-idx1-ubyte", idx({1}, std::string{"\x05", 1}));
}

/// The error message for `path`.
std::string complaint(fs::path const& path) {
  try {
    static_cast<void>(load_dataset(path));
  } catch (DataError const& error) {
    return error.what();
  }
  return "none";
}

bool has(std::string const& text, std::string const& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_SUITE("train_beyond_memory data") {
  TEST_CASE("load_dataset: the digits that come with the example are complete") {
    auto const data = load_dataset(SPILLWAY_EXAMPLE_DIGITS);

    CHECK(data.train.count() + data.test.count() == 1797);
    CHECK(data.test.count() == 360);
    CHECK(data.train.pixels == 64);
    CHECK(data.train.values.size() == data.train.count() * 64);
    CHECK(data.test.labels.front() == 0);   // the first line
    CHECK(data.train.labels.front() == 1);  // the second
    CHECK(data.test.picture(0)[2] == 5.0F / 16);
  }

  TEST_CASE("load_dataset: a CSV file may lack the last newline or use other line ends") {
    Folder const folder;
    auto const data = load_dataset(folder.write("a.csv", "0,16,1\r\n8,4,2\r\n\n1,2,3"));

    CHECK(data.test.labels == std::vector<std::int32_t>{1});
    CHECK(data.train.labels == std::vector<std::int32_t>{2, 3});
    CHECK(data.train.values == std::vector<float>{0.5F, 0.25F, 1.0F / 16, 2.0F / 16});
  }

  TEST_CASE("load_dataset: the error for a bad CSV file names the file and the line") {
    Folder const folder;
    CHECK(has(complaint(folder.write("a.csv", "1,2,3\n1,x,3\n")), "a.csv: line 2: expected whole"));
    CHECK(
        has(complaint(folder.write("b.csv", "1,2,3\n1,2\n")), "line 2: has 2 columns; expected 3"));
    CHECK(has(complaint(folder.write("c.csv", "1,17,3\n")), "line 1: expected whole"));
    CHECK(has(complaint(folder.write("d.csv", "1,-1,3\n")), "line 1: expected whole"));
    CHECK(has(complaint(folder.write("e.csv", "1,2,10\n")), "line 1: the label is not a digit"));
    CHECK(has(complaint(folder.write("f.csv", "1,2,\n")), "line 1: expected whole"));
    CHECK(has(complaint(folder.write("g.csv", "7\n")), "expected pixels and a label"));
    CHECK(has(complaint(folder.write("h.csv", "")), "holds 0 pictures"));
    CHECK(has(complaint(folder.path() / "none.csv"), "none.csv: there is no such file"));
  }

  TEST_CASE("load_dataset: a folder of MNIST files is read unchanged") {
    Folder const folder;
    write_mnist(folder);

    auto const data = load_dataset(folder.path());

    CHECK(data.train.count() == 3);
    CHECK(data.train.pixels == 4);
    CHECK(data.train.labels == std::vector<std::int32_t>{7, 0, 9});
    CHECK(data.train.picture(0)[1] == 1.0F);
    CHECK(data.train.picture(0)[2] == 0x33 / 255.0F);
    CHECK(data.train.picture(2)[3] == 8 / 255.0F);
    CHECK(data.test.labels == std::vector<std::int32_t>{5});
    CHECK(data.test.picture(0)[3] == 1.0F);
  }

  TEST_CASE("load_dataset: files with dots in their names are found, too") {
    Folder const folder;
    write_mnist(folder);
    fs::rename(folder.path() / "t10k-images-idx3-ubyte", folder.path() / "t10k-images.idx3-ubyte");

    CHECK(load_dataset(folder.path()).test.count() == 1);
  }

  TEST_CASE("load_dataset: the error for a bad IDX file names the file") {
    Folder const folder;
    std::string const name = "train-images-idx3-ubyte";
    auto const with = [&](std::string const& bytes) {
      write_mnist(folder);
      folder.write(name, bytes);
      return complaint(folder.path());
    };
    CHECK(has(with(idx({3, 2, 2}, "short")), name + ": holds 5 bytes of data; its header says 12"));
    CHECK(has(with(idx({3, 2, 2}, std::string(13, 'x'))),
              "holds 13 bytes of data; its header says 12"));
    CHECK(has(with(idx({3, 4}, std::string(12, 'x'))), name + ": is not an IDX file"));
    CHECK(has(with("\x1f\x8b rest"), name + ": is compressed"));
    CHECK(has(with("no"), name + ": is not an IDX file"));
    CHECK(has(with(idx({0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF}, "")), name + ": its extents are too"));
    CHECK(has(with(idx({2, 2, 2}, std::string(8, 'x'))), "holds 3 labels for 2 pictures"));
    CHECK(has(with(idx({3, 0, 2}, "")), name + ": holds no pictures"));
    CHECK(has(with(idx({3, 1, 2}, std::string(6, 'x'))), "differ in size"));

    write_mnist(folder);
    folder.write("t10k-labels-idx1-ubyte", idx({1}, "\x0A"));
    CHECK(has(complaint(folder.path()), "t10k-labels-idx1-ubyte: label 0 is not a digit"));
    fs::remove(folder.path() / "t10k-labels-idx1-ubyte");
    CHECK(has(complaint(folder.path()), "t10k-labels-idx1-ubyte: cannot be opened"));
    folder.write("t10k-labels-idx1-ubyte.gz", "");
    CHECK(has(complaint(folder.path()), "t10k-labels-idx1-ubyte.gz: is compressed"));
  }
}
