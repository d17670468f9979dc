//! A model as exchanges see it.

use std::sync::Arc;

use crate::lane::Tensors;
use crate::parameters::Parameter;
use crate::shards::Layout;

/// What the exchanges of a model have in common.
pub(crate) struct Model {
    pub parameters: Arc<[Parameter]>,
    pub tensors: Arc<dyn Tensors>,
    pub layout: Arc<Layout>,
}
