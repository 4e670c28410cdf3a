// What the loops use of torch's stable C++ interface, where there is no torch: tensors are read from a file, operators
// are called by name, and what they return and write goes to another file.

#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <tuple>
#include <vector>

namespace torch::headeronly {
enum class ScalarType : int64_t { Byte = 0, Int = 3, Long = 4, Float = 6, Double = 7, BFloat16 = 15 };  // torch's numbers
enum class DeviceType { CPU };
}  // namespace torch::headeronly

namespace torch::stable {

using headeronly::ScalarType;

struct Device {
  explicit Device(headeronly::DeviceType) {}
};

// Contiguous; copies share the memory.
class Tensor {
 public:
  Tensor() = default;
  Tensor(std::vector<int64_t> sizes, ScalarType type) : sizes_(std::move(sizes)), type_(type) {
    const std::align_val_t line{64};
    data_.reset(operator new(std::max<size_t>(1, bytes()), line), [=](void* data) { operator delete(data, line); });
  }
  template <class D>
  Tensor(void* data, std::vector<int64_t> sizes, ScalarType type, const D& free)
      : sizes_(std::move(sizes)), type_(type), data_(data, free) {}

  ScalarType scalar_type() const { return type_; }
  const std::vector<int64_t>& sizes() const { return sizes_; }
  int64_t size(int64_t i) const { return sizes_[i]; }
  int64_t dim() const { return static_cast<int64_t>(sizes_.size()); }
  int64_t numel() const {
    int64_t count = 1;
    for (const int64_t size : sizes_) count *= size;
    return count;
  }
  size_t bytes() const {
    const bool eight = type_ == ScalarType::Long || type_ == ScalarType::Double;
    return numel() * (type_ == ScalarType::Byte ? 1 : type_ == ScalarType::BFloat16 ? 2 : eight ? 8 : 4);
  }
  bool is_contiguous() const { return true; }
  void* mutable_data_ptr() const { return data_.get(); }
  const void* const_data_ptr() const { return data_.get(); }
  template <class T>
  const T* const_data_ptr() const {
    return static_cast<const T*>(data_.get());
  }

 private:
  std::vector<int64_t> sizes_;
  ScalarType type_ = ScalarType::Float;
  std::shared_ptr<void> data_;
};

inline Tensor contiguous(const Tensor& x) { return x; }
inline Tensor new_empty(const Tensor&, const std::vector<int64_t>& sizes, ScalarType type) { return {sizes, type}; }
template <class D>
Tensor from_blob(void* data, const std::vector<int64_t>& sizes, const std::vector<int64_t>&, Device, ScalarType type,
                 const D& free) {
  return {data, sizes, type, free};
}
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, const F& run) {
  for (; begin < end; begin += grain) run(begin, std::min(begin + grain, end));
}

// --- calls: numbers are of 8 bytes, tensors their type, number of sizes, sizes and elements --------------------------

template <class T>
T read_number() {
  T number;
  std::cin.read(reinterpret_cast<char*>(&number), sizeof number);
  return number;
}
inline void read(int64_t& number) { number = read_number<int64_t>(); }
inline void read(bool& number) { number = read_number<int64_t>() != 0; }
inline void read(double& number) { number = read_number<double>(); }
inline void read(ScalarType& number) { number = read_number<ScalarType>(); }
inline void read(Tensor& tensor) {
  const auto type = read_number<ScalarType>();
  std::vector<int64_t> sizes(read_number<int64_t>());
  for (int64_t& size : sizes) read(size);
  tensor = Tensor(std::move(sizes), type);
  std::cin.read(static_cast<char*>(tensor.mutable_data_ptr()), static_cast<std::streamsize>(tensor.bytes()));
}
inline void read(std::vector<Tensor>& tensors) {
  tensors.resize(read_number<int64_t>());
  for (Tensor& tensor : tensors) read(tensor);
}

template <class T>
void write(const T&) {}
inline void write(const Tensor& tensor) {
  std::cout.write(static_cast<const char*>(tensor.const_data_ptr()), static_cast<std::streamsize>(tensor.bytes()));
}
inline void write(const std::vector<Tensor>& tensors) {
  for (const Tensor& tensor : tensors) write(tensor);
}

// Reads the arguments, and writes the result and then the arguments, which the operator may have written to.
template <class R, class... A>
std::function<void()> boxed(R (*run)(A...)) {
  return [run] {
    std::tuple<A...> arguments;
    std::apply([](auto&... each) { (read(each), ...); }, arguments);
    if constexpr (std::is_void_v<R>) {
      std::apply(run, arguments);
    } else {
      write(std::apply(run, arguments));
    }
    std::apply([](const auto&... each) { (write(each), ...); }, arguments);
  };
}

struct Library {
  static std::map<std::string, std::function<void()>>& operators() {
    static std::map<std::string, std::function<void()>> all;
    return all;
  }
  explicit Library(void (*fill)(Library&)) { fill(*this); }
  void impl(const char* name, std::function<void()> run) { operators()[name] = std::move(run); }
};

}  // namespace torch::stable

#define TORCH_BOX(run) torch::stable::boxed(run)
#define STABLE_TORCH_LIBRARY_IMPL(space, device, library)             \
  static void fill_##space##_##device(torch::stable::Library&);       \
  static torch::stable::Library library_##space(fill_##space##_##device); \
  static void fill_##space##_##device(torch::stable::Library& library)
